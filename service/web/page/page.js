// The page: controls -> request -> service -> views. Everything that others know of each other, they know from here.

import { choose } from "./colours.js";
import * as form from "./form.js";
import { Heads } from "./heads.js";
import { Matrix } from "./matrix.js";
import { markNumbers, showNumbers } from "./numbers.js";
import { Pattern, largest } from "./pattern.js";
import { Pointing } from "./pointing.js";
import { fromWords, lengths, tokensOf, withMasks } from "./request.js";
import { copy, download } from "./takeaway.js";
import { attend, get, post, Refusal } from "./wire.js";
import { Words } from "./words.js";

const $ = (id) => document.getElementById(id);
const PAUSE = 300; // ms after the last key before typing counts as done

const pointing = new Pointing($("tip"), $("live"), block);
const matrix = new Matrix($("matrix"), pointing);
const words = new Words($("words"), pointing);
const heads = new Heads($("heads"), enlarge, redraw);
pointing.serve(matrix, words);

const blocked = new Set(); // "q,k"
let [asked, reply, pattern, wording, shown] = [null, null, null, null, "mean"];
let [running, waiting] = [null, 0];
const specs = new Map(); // layer -> spec
const model = { layers: [], missing: "" }; // the real model's layers, or what to install for them

async function run() {
  clearTimeout(waiting);
  running?.abort();
  const { signal } = (running = new AbortController());
  $("result").setAttribute("aria-busy", "true");
  try {
    form.clearErrors();
    const next = await compose(signal);
    const answer = await attend(next.request, signal);
    performance.mark("attend:reply");
    [asked, reply] = [next, answer];
    showItems();
    show();
    requestAnimationFrame(() => setTimeout(() => performance.measure("attend:paint", "attend:reply")));
    $("result").classList.remove("stale");
    describe();
    await analyse(signal);
  } catch (error) {
    if (error.name !== "AbortError") refuse(error);
  } finally {
    if (running?.signal === signal) $("result").setAttribute("aria-busy", "false");
  }
}

/** What to ask: {request, tokens}; tokens(item, queries, keys) gives the words of the axes. */
async function compose(signal) {
  if (form.mode() === "request") return composePasted();
  const layer = $("layer").value;
  const read = async (field, part) => await placed({ text: field, part: field }, () => readWords($(field).value, layer, part, signal));
  const sides = { query: await read("text", "query") };
  if ($("cross").checked) sides.key = await read("keys", "key");
  const spec = await specOf(layer, signal);
  if (spec.value_dim !== spec.key_dim) sides.value = await read(sides.key ? "keys" : "text", "value");
  if (!sides.key && spec.key_dim !== spec.d_model) sides.key = await read("text", "key");
  const tokens = { query: sides.query.tokens, key: (sides.key ?? sides.query).tokens };
  const body = withMasks(fromWords(layer, sides), form.masks(blocked), tokens.query.length, tokens.key.length);
  return { request: body, tokens: () => tokens, note: sides.query, cross: $("cross").checked, fields: { query: "text", key: "keys", value: "keys" } };
}

function composePasted() {
  const text = $("request").value;
  let body;
  try {
    body = JSON.parse(text);
  } catch {
    return { request: text, fields: { "*": "request", "": "request" } }; // the service says what is wrong, and where
  }
  const fields = { "*": "request", "": "request" };
  if (body === null || typeof body !== "object" || Array.isArray(body)) return { request: text, fields };
  const { select, outputs, reply: replyForm, ...rest } = body;
  const { queries, keys } = lengths(rest);
  const request = withMasks({ ...rest, layer: $("layer").value }, form.masks(blocked), queries, keys);
  return { request, tokens: (item, q, k) => tokensOf(request, item, q, k), fields };
}

const dictionary = new Map(); // what /words said, by what was asked

async function readWords(text, layer, part, signal) {
  const question = JSON.stringify({ text, layer, part });
  if (!dictionary.has(question)) {
    if (dictionary.size > 30) dictionary.clear();
    dictionary.set(question, await (await post("words", question, { signal })).json());
  }
  return dictionary.get(question);
}

async function specOf(name, signal) {
  if (!specs.has(name)) specs.set(name, (await get(`layers/${encodeURIComponent(name)}`, signal)).spec);
  return specs.get(name);
}

/** Runs `ask`, and says of a refusal to which fields its pointers belong. */
async function placed(fields, ask) {
  try {
    return await ask();
  } catch (error) {
    if (error instanceof Refusal) error.fields = fields;
    throw error;
  }
}

function refuse(error) {
  if (!(error instanceof Refusal)) console.error(error);
  const problems = error instanceof Refusal ? error.problems : [{ at: "/block_mask", text: error.message }];
  const fields = form.mode() === "request" ? { "*": "request", "": "request" } : { query: "text", tokens: "text", key: "keys", value: "keys" };
  const network = error.status === 0 || error.status === 429 || error.status >= 500;
  form.showErrors(problems, network ? { "*": "", "": "" } : { ...fields, ...error.fields });
  $("result").classList.add("stale");
}

function showItems() {
  const batch = form.mode() === "request" ? lengths(asked.request).batch : null;
  $("items").hidden = !(batch > 1);
  const item = Math.min($("item").value || 0, (batch ?? 1) - 1);
  if ($("item").length !== (batch ?? 1)) $("item").replaceChildren(...Array.from({ length: batch ?? 1 }, (_, i) => new Option(String(i), String(i))));
  $("item").value = String(item);
}

/** Takes the reply apart and draws everything. */
function show() {
  const item = Number($("item").value || 0);
  pattern = new Pattern(reply.weights, reply.shape, item);
  const next = asked.tokens(item, pattern.queries, pattern.keys);
  if (JSON.stringify(next) !== JSON.stringify(wording)) wording = next;
  if (shown !== "mean" && shown >= pattern.heads) shown = "mean";
  matrix.blocked = blocked;
  if (heads.count !== pattern.heads) heads.build(pattern.heads);
  redraw();
}

function redraw() {
  if (!pattern) return;
  const scale = $("scale").value;
  const mean = pattern.mean(heads.chosen);
  const square = shown === "mean" ? mean : pattern.squares[shown];
  const name = shown === "mean" ? `Mean of ${heads.chosen.length} heads` : `Head ${shown}`;
  heads.show(pattern, mean, shown, scale);
  matrix.show(square, wording, scale);
  words.show(square, wording, scale);
  pointing.show(square, wording, name);
  $("matrix-title").textContent = name;
  $("matrix").setAttribute("aria-label", `Attention weights, ${name}, ${pattern.queries} queries by ${pattern.keys} keys`);
  $("most").textContent = scale === "one" ? "1" : scale === "row" ? "row's largest" : largest(square.data, 0, square.data.length).toFixed(3);
  $("all").hidden = heads.chosen.length === pattern.heads;
  Matrix.ramp($("ramp"));
  markNumbers($("numbers").querySelector("table"), shown);
}

function describe() {
  const [, count, queries, keys] = reply.shape;
  const compute = /compute;dur=([\d.]+)/.exec(reply.timing)?.[1];
  $("summary").textContent = `${count} heads, ${queries} queries × ${keys} keys${compute ? `, computed in ${Number(compute).toFixed(1)} ms` : ""}`;
  const spec = specs.get(reply.layer.name);
  $("layer-about").textContent = spec ? `${spec.num_heads} heads, ${spec.d_model} wide, ${reply.layer.fingerprint.slice(0, 12)}` : "";
  const said = asked.note;
  const between = said?.meaningful && asked.cross ? " Between two sentences they are used as the model never does, though." : "";
  $("note").textContent = said ? said.note + between + (said.meaningful ? "" : ` ${model.missing}`) : "";
  $("note").classList.toggle("warn", Boolean(said) && (!said.meaningful || asked.cross));
  $("note").hidden = !said;
}

async function analyse() {}

function enlarge(name) {
  shown = name;
  redraw();
}

/** Blocks a cell for all heads, or frees it, and asks again. */
function block({ q, k }) {
  const cell = `${q},${k}`;
  if (!blocked.delete(cell)) blocked.add(cell);
  $("live").textContent = `${wording.query[q]} to ${wording.key[k]} ${blocked.has(cell) ? "blocked" : "free"}`;
  showBlocked();
  run();
}

function showBlocked() {
  $("blocked").textContent = blocked.size ? `${blocked.size} single ${blocked.size === 1 ? "cell" : "cells"} blocked` : "No single cells blocked";
  $("unblock").hidden = !blocked.size;
  matrix.draw();
}

function unblock() {
  blocked.clear();
  showBlocked();
}

/** The request as it is shown: with the heads that are on, where some are off. */
function taken() {
  const some = pattern && heads.chosen.length && heads.chosen.length < pattern.heads;
  return some ? { ...asked.request, select: { heads: heads.chosen } } : asked.request;
}

async function take(act) {
  form.clearErrors();
  if (!asked) return;
  try {
    $("taken").textContent = await act();
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    $("taken").textContent = "";
    form.showErrors(error.problems, { "*": "take", "": "take" });
  }
}

function soon() {
  clearTimeout(waiting);
  waiting = setTimeout(run, PAUSE);
}

/** A pasted request brings its masks and its layer to the controls. */
function readPasted() {
  try {
    const body = JSON.parse($("request").value);
    form.showMasks(body);
    const name = body.layer ?? "default";
    if (![...$("layer").options].some((option) => option.value === name)) $("layer").append(new Option(String(name), String(name)));
    $("layer").value = name;
  } catch {
    // no JSON yet: what is wrong with it, the service says when it is asked
  }
}

function listen() {
  const on = (id, event, act) => $(id).addEventListener(event, act);
  on("ask", "submit", (event) => (event.preventDefault(), run()));
  for (const id of ["text", "keys"]) on(id, "input", () => (unblock(), soon()));
  on("request", "input", () => (unblock(), readPasted(), soon()));
  for (const id of ["left", "right", "length", "offset"]) on(id, "input", soon);
  for (const id of ["causal", "layer"]) on(id, "change", run);
  on("cross", "change", () => (unblock(), form.showMode(), run()));
  on("item", "change", () => (show(), describe()));
  on("unblock", "click", () => (unblock(), run()));
  on("scale", "change", redraw);
  on("all", "click", () => (heads.switchAll(), redraw()));
  on("larger", "click", () => pattern && matrix.magnify(1.5));
  on("smaller", "click", () => pattern && matrix.magnify(1 / 1.5));
  on("block", "click", () => {
    pointing.blocking = !pointing.blocking;
    $("block").setAttribute("aria-pressed", String(pointing.blocking));
  });
  for (const radio of document.querySelectorAll("input[name=input]")) radio.addEventListener("change", switchMode);
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", () => take(() => copy(button.dataset.copy, taken(), $("code"))));
  }
  for (const button of document.querySelectorAll("[data-figure]")) {
    button.addEventListener("click", () => take(() => picture(button.dataset.figure)));
  }
}

async function picture(format) {
  $("taken").textContent = "Drawing…";
  const isHead = $("kind").value === "shown" && shown !== "mean";
  const kind = isHead ? "head" : $("kind").value === "shown" ? "mean" : $("kind").value;
  const figure = { kind, format, theme: document.documentElement.dataset.theme, item: Number($("item").value || 0) };
  if (isHead) figure.heads = [shown];
  else if (kind !== "concatenation" && heads.chosen.length) figure.heads = heads.chosen;
  await download(asked.request, figure, `attention-${kind}.${format}`);
  return `Downloaded attention-${kind}.${format}`;
}

/** Switching to the request starts with the sentence's own, for something to begin with. */
function switchMode() {
  form.showMode();
  unblock();
  if (form.mode() === "request") {
    if (!$("request").value && typeof asked?.request === "object") $("request").value = JSON.stringify(asked.request);
    readPasted();
  } else {
    form.showMasks({});
  }
  run();
}

function colours() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const chosen = $("theme").value || (dark.matches ? "dark" : "light");
    document.documentElement.dataset.theme = chosen;
    choose(chosen);
    redraw();
  };
  try {
    $("theme").value = localStorage.getItem("theme") ?? "";
  } catch {
    // storage is closed to this page: it begins with the system's colours
  }
  $("theme").addEventListener("change", () => {
    try {
      localStorage.setItem("theme", $("theme").value);
    } catch {
      // as above
    }
    apply();
  });
  dark.addEventListener("change", apply);
  apply();
}

async function begin() {
  colours();
  form.showMode();
  listen();
  try {
    const [{ layers }, vocabulary] = await Promise.all([get("layers"), get("words")]);
    for (const { name, spec } of layers) specs.set(name, spec);
    Object.assign(model, { layers: vocabulary.layers, missing: vocabulary.layers.length ? `Choose ${vocabulary.layers[0]} for one that does.` : vocabulary.note });
    form.showLayers(layers.map(({ name }) => name), vocabulary.layers, vocabulary.layers[0] ?? "default");
  } catch (error) {
    return refuse(error);
  }
  await run();
}

begin();
