// Adds layers from files that are dropped on the page or chosen: a safetensors file; a model's folder, of which one or all layers are sent; or a
// file of attend capture, which has layers with the inputs that their model gave them.
// Only the headers of files are read; tensors stay slices of the files until they are sent.

import { $ } from "./dom.js";
import { keepInputs } from "./embeddings.js";
import { attempt, keepCaptured, keepModel, showMode } from "./form.js";
import { get, putTensors, Refusal } from "./wire.js";

const ATTENTION = /(?:^|\.)(?!\w*norm)\w*(?:att|mixer|temporal_block)\w*\./i; // part of each tensor's name, in every family of service/attend/checkpoints
const SHARED = /relative_attention_bias|(?:^|\.)(?:rel_embeddings|encoder\.LayerNorm)\./; // tables that layers share, and their norm (T5, DeBERTa)
const EXPECTED = "Expected a safetensors file, or a model's folder with config.json and model.safetensors";
const WEIGHT = "weights/"; // before the name of a weight in a file of attend capture
const LAYERS = ["num_hidden_layers", "n_layer", "n_layers", "num_layers"]; // fields of a config with the number of layers
const PARTS = { encoder: "Encoder", decoder: "Decoder", cross: "Cross-attention", text: "Text", vision: "Images", audio: "Sound" }; // others as they are
const DATATYPES = { BOOL: "BOOL", U8: "UINT8", I32: "INT32", I64: "INT64", F16: "FP16", BF16: "BF16", F32: "FP32", F64: "FP64" };
let [queue, waiting] = [Promise.resolve(), 0]; // uploads, which run one after the other, and how many wait behind the one that runs
let families = null; // promise of the families of models that the service knows
let source = null; // {file}, or {config, fields, tensors, parts, tokenizer} of a folder; `config` and `tokenizer` are texts of files

/** Listens for files; calls `added(name)` with the first layer that was added. */
export function followFiles(added) {
  document.addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
  document.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    const files = dropped(event.dataTransfer); // at once: the event has them only now
    upload(async () => offer(added, ...(await files)));
  });
  for (const id of ["file", "folder"]) {
    $(`choose-${id}`).addEventListener("click", () => $(id).click());
    $(id).addEventListener("change", () => {
      const files = chosen($(id));
      upload(() => offer(added, ...files));
    });
  }
  $("upload-part").addEventListener("change", offerLayers);
  $("upload").addEventListener("submit", (event) => (event.preventDefault(), upload(() => add(added))));
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

/** [name, files] of the folder that was chosen with an input, without what is in folders below it, or of a file. */
function chosen(input) {
  const parts = (file) => file.webkitRelativePath.split("/");
  const files = [...input.files].filter((file) => parts(file).length <= 2);
  input.value = ""; // so that the same files can be chosen again
  return [files.length ? parts(files[0])[0] : "", files];
}

/** Shows what can be added of these files; adds those of attend capture at once. */
async function offer(added, name, files) {
  const config = files.find((file) => file.name === "config.json");
  const weights = files.filter((file) => file.name.endsWith(".safetensors"));
  const captures = config ? [] : await Promise.all(weights.map(async (file) => (await readHeader(file)).header.__metadata__?.capture));
  const isCaptured = captures.length > 0 && captures.every(Boolean);
  if (!weights.length || (!config && weights.length > 1 && !isCaptured)) throw new Error(`${EXPECTED}, got ${files.map((file) => file.name).join(", ") || "nothing"}`);
  if (isCaptured) {
    for (const [i, capture] of captures.entries()) await addCapture(await openTensors([weights[i]]), JSON.parse(capture), added);
    return;
  }
  $("upload-name").value = (name || weights[0].name.replace(/\.safetensors$/, "")).replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[^A-Za-z0-9]+/, "").slice(0, 60);
  if (config) await offerModel(config, weights, files);
  else source = { file: weights[0] };
  $("upload-model").hidden = !config;
  $("upload-file").hidden = Boolean(config);
  $("upload-parts").hidden = false;
  $("upload").querySelector("details").open = true;
  $("upload-name").focus();
}

async function offerModel(file, weights, files) {
  const config = await file.text();
  const tensors = await openTensors(weights);
  const fields = JSON.parse(config);
  const parts = partsOf(fields, await (families ??= get("page/families.json")));
  source = { config, fields, tensors, parts, tokenizer: await files.find((one) => one.name === "tokenizer.json")?.text() };
  $("upload-part").replaceChildren(...Array.from(parts.keys(), (part) => new Option(PARTS[part] ?? part, part)));
  $("upload-part").parentElement.hidden = parts.size < 2;
  offerLayers();
}

/** Offers the layers of the chosen part. */
function offerLayers() {
  const { fields, tensors, parts } = source;
  const count = countLayers(fields, tensors, parts.get($("upload-part").value));
  const each = Array.from({ length: count }, (_, i) => new Option(`Layer ${i}`, String(i)));
  $("upload-layers").replaceChildren(new Option(`All ${count} layers`, Array.from({ length: count }, (_, i) => i).join(" ")), ...each);
}

/**
 * The parts of a model by name, as the service finds them: {section, layers}, the config or its section about the part, and the fields with
 * the number of its layers. `known` is the table of families of the service. Empty for a model that is not in it.
 */
export function partsOf(config, { families, composites, sections }) {
  const inside = composites.includes(config.model_type) ? sections.map((name) => config[name]).filter((section) => section?.constructor === Object) : [];
  const parts = new Map();
  for (const section of inside.length ? inside : [config]) {
    for (const [part, { flag, layers }] of Object.entries(families[section.model_type] ?? {})) {
      if (!parts.has(part) && (!flag || section[flag])) parts.set(part, { section, layers });
    }
  }
  return parts;
}

async function add(added) {
  const name = stem();
  const names = [];
  for (const [layer, query, body] of requests(name)) {
    showStatus(`Adding ${layer}…`);
    await putTensors(`layers/${encodeURIComponent(layer)}${query}`, body);
    names.push(layer);
  }
  if (!source.file) {
    const { fields, tensors, tokenizer } = source;
    const numbers = $("upload-layers").value.split(" ").map(Number);
    const options = await keepInputs(name, names, numbers, chosenPart(), tensors, fields, tokenizer);
    keepModel({ title: name, layers: names, options });
    $("input-sentence").checked = true;
    showMode();
  }
  showStatus(`Added ${names.length > 1 ? `${names[0]} to ${names.at(-1)}` : names[0]}`);
  added(names[0]);
}

/** Adds the layers of a file of attend capture, and keeps the requests with their inputs. */
async function addCapture(tensors, { name, layers, effects = null }, added) {
  $("upload-parts").hidden = true;
  $("upload").querySelector("details").open = true;
  for (const { name: layer, spec, request } of layers) {
    showStatus(`Adding ${layer}…`);
    const own = startingWith(`${layer}/`, tensors);
    const weights = startingWith(WEIGHT, own);
    if (weights.size) await putTensors(`layers/${encodeURIComponent(layer)}`, fileOf(weights, { spec: JSON.stringify(spec) }));
    const inputs = [...own].filter(([tensor]) => !tensor.includes("/")); // the others are its weights and what it gave in the model
    const fields = await Promise.all(inputs.map(async ([field, tensor]) => [field, await inBase64(tensor)]));
    keepCaptured({ layer, ...Object.fromEntries(fields), ...request }, effects);
  }
  showStatus(`Added ${layers.length} ${layers.length === 1 ? "layer" : "layers"} of ${name} with their inputs`);
  added(layers[0].name);
}

/** The tensors whose names start with a text, by the rest of their names. */
function startingWith(start, tensors) {
  return new Map([...tensors].filter(([name]) => name.startsWith(start)).map(([name, tensor]) => [name.slice(start.length), tensor]));
}

/** A tensor as a member of a request. */
async function inBase64({ dtype, shape, data }) {
  const url = await new Promise((resolve, reject) => {
    const reader = Object.assign(new FileReader(), { onerror: () => reject(reader.error), onload: () => resolve(reader.result) });
    reader.readAsDataURL(data);
  });
  return { shape, datatype: DATATYPES[dtype], base64: url.slice(url.indexOf(",") + 1) };
}

/** [name, query, body] of each PUT. */
function requests(name) {
  const given = (entries) => entries.filter(([, value]) => value);
  const value = (id) => $(id).value.trim();
  if (source.file) {
    const query = new URLSearchParams(given([["prefix", value("upload-prefix")], ["spec", value("upload-spec")]]));
    return [[name, String(query) && `?${query}`, source.file]];
  }
  const part = Object.fromEntries(given([["part", chosenPart()]]));
  const numbers = $("upload-layers").value.split(" ");
  const { config, fields, tensors } = source;
  return numbers.map((layer) => [`${name}-${layer}`, "", fileOf(tensorsOfLayer(tensors, Number(layer), fields), { config, layer, ...part })]);
}

/** Runs an upload after those before it. */
function upload(act) {
  waiting += 1;
  queue = queue.catch(() => {}).then(() => {
    waiting -= 1;
    return attemptUpload(act);
  });
  showWaiting();
}

/** Says what is being done, and how many uploads wait until it is. */
function showStatus(text) {
  $("upload-status").textContent = text;
  showWaiting();
}

function showWaiting() {
  $("upload-waiting").textContent = waiting > 1 ? `${waiting} more wait` : waiting ? "One more waits" : "";
}

/** Shows the refusal of the service, or the error of reading a file. */
async function attemptUpload(act) {
  showStatus("");
  const refused = (error) => Promise.reject(error instanceof Refusal ? error : new Refusal(0, error.message));
  if (await attempt("upload", () => act().catch(refused))) return;
  $("upload").querySelector("details").open = true;
  showStatus("");
}

/** Name -> {dtype, shape, data: Blob} for the tensors of several files. Throws Error with a text for people. */
async function openTensors(files) {
  const tensors = new Map();
  for (const file of files) {
    const { start, header } = await readHeader(file);
    const { __metadata__, ...entries } = header; // files that transformers writes have metadata
    for (const [name, { dtype, shape, data_offsets: [begin, end] }] of Object.entries(entries)) {
      tensors.set(name, { dtype, shape, data: file.slice(start + begin, start + end) });
    }
  }
  return tensors;
}

async function readHeader(file) {
  try {
    const size = Number(new DataView(await file.slice(0, 8).arrayBuffer()).getBigUint64(0, true));
    return { start: 8 + size, header: JSON.parse(await file.slice(8, 8 + size).text()) };
  } catch {
    throw new Error(`Expected a safetensors file, got ${file.name}`);
  }
}

/** What the names of the layers begin with: as of attend capture, with the part if there are several. */
const stem = () => [$("upload-name").value.trim(), ...(!source.file && chosenPart() ? [chosenPart()] : [])].join("-");

/** The chosen part of a model; "" if it has one alone. */
const chosenPart = () => (source.parts.size > 1 ? $("upload-part").value : "");

/** How many layers a part of a model has, by its config or else by the first numbers in the names of its tensors. */
function countLayers(config, tensors, { section, layers } = { section: { ...config, ...config.text_config }, layers: LAYERS }) {
  if (section.depths) return section.depths.reduce((sum, depth) => sum + depth, 0);
  return layers.map((name) => section[name]).find(Number.isInteger) ?? 1 + Math.max(...[...tensors.keys()].map((name) => numbersIn(name)[0] ?? 0));
}

/** The attention tensors of this layer, by the numbers in their names, and tables that layers share; those of all layers if none has them. */
function tensorsOfLayer(tensors, number, config) {
  const attention = [...tensors].filter(([name]) => ATTENTION.test(name) || SHARED.test(name));
  const place = placeOf(number, config);
  const own = attention.filter(([name]) => place.every((n, i) => numbersIn(name)[i] === n));
  return new Map(own.length ? [...own, ...attention.filter(([name]) => SHARED.test(name))] : attention);
}

/** The first numbers in the names of a layer's tensors: its own, or its stage and block in a model with stages (Swin). */
function placeOf(number, { depths }) {
  if (!depths) return [number];
  let stage = 0;
  while (number >= depths[stage]) number -= depths[stage++];
  return [stage, number];
}

/** The segments of a name that are numbers. */
function numbersIn(name) {
  return name.split(".").filter((segment) => /^\d+$/.test(segment)).map(Number);
}

/** A safetensors file of these tensors, with `metadata`, texts by name. */
function fileOf(tensors, metadata) {
  const header = { __metadata__: metadata };
  let end = 0;
  for (const [name, { dtype, shape, data }] of tensors) header[name] = { dtype, shape, data_offsets: [end, (end += data.size)] };
  const text = new TextEncoder().encode(JSON.stringify(header));
  const padding = new Uint8Array(-text.length & 7).fill(32); // the tensors begin at a multiple of eight
  const size = new DataView(new ArrayBuffer(8));
  size.setBigUint64(0, BigInt(text.length + padding.length), true);
  return new Blob([size.buffer, text, padding, ...[...tensors.values()].map(({ data }) => data)]);
}
