// Adds layers from files that are dropped on the page or chosen: a safetensors file, or a model's folder, of which one or all layers are sent.

import { countLayers, fileOf, openTensors, tensorsOfLayer } from "./checkpoint.js";
import { $ } from "./dom.js";
import { attempt } from "./form.js";
import { putTensors, Refusal } from "./wire.js";

const EXPECTED = "Expected a safetensors file, or a model's folder with config.json and model.safetensors";
let source = null; // {file}, or {config, fields, tensors} of a folder; `config` is the text of the file

/** Listens for files; calls `added(name)` with the first layer that was added. */
export function followFiles(added) {
  document.addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
  document.addEventListener("drop", (event) => hasFiles(event) && (event.preventDefault(), attemptUpload(async () => offer(...(await dropped(event.dataTransfer))))));
  for (const id of ["file", "folder"]) {
    $(`choose-${id}`).addEventListener("click", () => $(id).click());
    $(id).addEventListener("change", () => attemptUpload(() => offer(...chosen(takeFiles($(id))))));
  }
  $("upload").addEventListener("submit", (event) => (event.preventDefault(), attemptUpload(() => add(added))));
}

/** The files of an input, which is emptied, so that the same files can be chosen again. */
function takeFiles(input) {
  const files = [...input.files];
  input.value = "";
  return files;
}

const hasFiles = ({ dataTransfer }) => dataTransfer.types.includes("Files");

/** [name, files] of a dropped folder or of dropped files. */
async function dropped(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry()).filter(Boolean);
  const folder = entries.find((entry) => entry.isDirectory);
  const open = (entry) => new Promise((resolve, reject) => entry.file(resolve, reject));
  const inside = folder ? await entriesOf(folder.createReader()) : entries;
  return [folder?.name ?? "", await Promise.all(inside.filter((entry) => entry.isFile).map(open))];
}

async function entriesOf(reader) {
  const all = [];
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject)); // at most 100 at a time
    if (!some.length) return all;
    all.push(...some);
  }
}

/** [name, files] of a chosen folder, without what is in folders below it, or of a chosen file. */
function chosen(files) {
  const parts = (file) => file.webkitRelativePath.split("/");
  return [files.length ? parts(files[0])[0] : "", files.filter((file) => parts(file).length <= 2)];
}

/** Shows what can be added of these files. */
async function offer(name, files) {
  const config = files.find((file) => file.name === "config.json");
  const weights = files.filter((file) => file.name.endsWith(".safetensors"));
  if (!weights.length || (!config && weights.length > 1)) throw new Error(`${EXPECTED}, got ${files.map((file) => file.name).join(", ") || "nothing"}`);
  $("upload-name").value = (name || weights[0].name.replace(/\.safetensors$/, "")).replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[^A-Za-z0-9]+/, "").slice(0, 60);
  if (config) await offerModel(config, weights);
  else source = { file: weights[0] };
  $("upload-model").hidden = !config;
  $("upload-file").hidden = Boolean(config);
  $("upload-parts").hidden = false;
  $("upload").querySelector("details").open = true;
  $("upload-name").focus();
}

async function offerModel(file, weights) {
  const config = await file.text();
  const tensors = await openTensors(weights);
  const fields = JSON.parse(config);
  const count = countLayers(fields, tensors);
  source = { config, fields, tensors };
  const each = Array.from({ length: count }, (_, i) => new Option(`Layer ${i}`, String(i)));
  $("upload-layers").replaceChildren(new Option(`All ${count} layers`, Array.from({ length: count }, (_, i) => i).join(" ")), ...each);
}

async function add(added) {
  const name = $("upload-name").value.trim();
  const names = [];
  for (const [layer, query, body] of requests(name)) {
    $("upload-status").textContent = `Adding ${layer}…`;
    await putTensors(`layers/${encodeURIComponent(layer)}${query}`, body);
    names.push(layer);
  }
  $("upload-status").textContent = `Added ${names.length > 1 ? `${names[0]} to ${names.at(-1)}` : names[0]}`;
  added(names[0]);
}

/** [name, query, body] of each PUT. */
function requests(name) {
  const given = (entries) => entries.filter(([, value]) => value);
  const value = (id) => $(id).value.trim();
  if (source.file) {
    const query = new URLSearchParams(given([["prefix", value("upload-prefix")], ["spec", value("upload-spec")]]));
    return [[name, String(query) && `?${query}`, source.file]];
  }
  const part = Object.fromEntries(given([["part", value("upload-part")]]));
  const numbers = $("upload-layers").value.split(" ");
  const { config, fields, tensors } = source;
  return numbers.map((layer) => [`${name}-${layer}`, "", fileOf(tensorsOfLayer(tensors, Number(layer), fields), { config, layer, ...part })]);
}

/** Shows the refusal of the service, or the error of reading a file. */
async function attemptUpload(act) {
  $("upload-status").textContent = "";
  const refused = (error) => Promise.reject(error instanceof Refusal ? error : new Refusal(0, "", error.message));
  if (await attempt("upload", () => act().catch(refused))) return;
  $("upload").querySelector("details").open = true;
  $("upload-status").textContent = "";
}
