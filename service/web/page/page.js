// The page: controls -> request -> service -> views. The other modules do not import each other's views; this one connects them.

import { denied, followKey } from "./access.js";
import { compose, fieldsOf, specs } from "./compose.js";
import { $ } from "./dom.js";
import * as form from "./form.js";
import { Heads } from "./heads.js";
import { Matrix } from "./matrix.js";
import { LINKS, Numbers } from "./numbers.js";
import { Pattern, largest } from "./pattern.js";
import { Pointing } from "./pointing.js";
import { lengths } from "./request.js";
import { copy, download, figureOf } from "./takeaway.js";
import { follow } from "./theme.js";
import { attend, get, post, Refusal } from "./wire.js";
import { Words } from "./words.js";

const PAUSE = 300; // ms after the last key until the request is sent

const matrix = new Matrix($("matrix"));
const pointing = new Pointing(matrix, $("tip"), $("live"), block);
const words = (pointing.words = new Words($("words"), pointing));
const heads = new Heads($("heads"), enlarge, redraw);
const numbers = new Numbers($("numbers"), enlarge);

const blocked = new Set(); // "q,k"
let [composed, reply, pattern, mean, metrics, wording, shown] = [null, null, null, null, null, null, "mean"];
let [running, waiting, advice] = [null, 0, null]; // advice: which trained layer to choose or install

async function run() {
  if (advice === null) return await load();
  const signal = restart();
  $("result").setAttribute("aria-busy", "true");
  try {
    form.clearErrors();
    const next = await compose(blocked, signal);
    const answer = await attend(next.request, signal);
    performance.mark("attend:reply");
    if (!answer.weights.length) throw new Refusal(422, "", "There is nothing to show: no queries, or no keys");
    [composed, reply] = [next, answer];
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

/** Stops what is waiting or running; returns the signal for the next run. */
function restart() {
  clearTimeout(waiting);
  running?.abort();
  running = new AbortController();
  return running.signal;
}

function refuse(error) {
  if (!(error instanceof Refusal)) throw error;
  $("result").classList.add("stale");
  if (denied(error)) return;
  const ours = error.status === 0 || error.status === 429 || error.status >= 500; // not the fault of a field
  form.showErrors(error.problems, ours ? { "*": "", "": "" } : fieldsOf(error));
}

function showItems() {
  const [count] = reply.shape;
  const item = Math.min($("item").value || 0, count - 1);
  $("items").hidden = count === 1;
  $("item").replaceChildren(...Array.from({ length: count }, (_, i) => new Option(String(i), String(i))));
  $("item").value = String(item);
}

/** Draws everything from the reply. */
function show() {
  const item = Number($("item").value);
  pattern = new Pattern(reply.weights, reply.shape, item);
  const next = composed.tokens(item, pattern.queries, pattern.keys);
  if (JSON.stringify(next) !== JSON.stringify(wording)) wording = next;
  if (shown !== "mean" && shown >= pattern.heads) shown = "mean";
  matrix.blocked = blocked;
  heads.build(pattern.heads);
  redraw();
}

function redraw() {
  if (!pattern) return;
  mean = pattern.mean(heads.chosen);
  heads.show(pattern, mean, $("scale").value);
  $("all").hidden = heads.chosen.length === pattern.heads;
  Matrix.ramp($("ramp"));
  drawShown();
}

function drawShown() {
  const scale = $("scale").value;
  const square = shown === "mean" ? mean : pattern.squares[shown];
  const name = shown === "mean" ? `Mean of ${heads.chosen.length} heads` : `Head ${shown}`;
  heads.mark(shown);
  matrix.show(square, wording, scale);
  words.show(square, wording, scale);
  pointing.show(square, wording, name);
  $("matrix-title").textContent = name;
  $("matrix").setAttribute("aria-label", `Attention weights, ${name}, ${pattern.queries} queries by ${pattern.keys} keys`);
  $("most").textContent = scale === "one" ? "1" : scale === "row" ? "row's largest" : largest(square.data, 0, square.data.length).toFixed(3);
  numbers.mark(shown);
}

function describe() {
  const [, count, queries, keys] = reply.shape;
  const compute = /compute;dur=([\d.]+)/.exec(reply.timing)?.[1];
  $("summary").textContent = `${count} heads, ${queries} queries × ${keys} keys${compute ? `, computed in ${Number(compute).toFixed(1)} ms` : ""}`;
  const spec = specs.get(reply.layer.name);
  $("layer-about").textContent = spec ? `${spec.num_heads} heads, ${spec.d_model} wide, ${reply.layer.fingerprint.slice(0, 12)}` : "";
  const note = composed.note;
  const between = note?.meaningful && composed.cross ? " Between two sentences they are used as the model never does, though." : "";
  $("note").textContent = note ? note.note + between + (note.meaningful ? "" : ` ${advice}`) : "";
  $("note").classList.toggle("warn", Boolean(note) && (!note.meaningful || composed.cross));
  $("note").hidden = !note;
}

/** Head statistics, or the service's reason why they are not defined for this request. */
async function analyse(signal) {
  try {
    metrics = (await (await post("attend/analysis", { ...composed.request, analysis: { top_links: LINKS } }, { signal })).json()).metrics;
    showMetrics();
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    numbers.clear();
    if (!denied(error)) form.showProblems("numbers", error.problems);
  }
}

function showMetrics() {
  numbers.show(metrics, Number($("item").value), lengths(composed.request).batch !== null);
}

function enlarge(name) {
  shown = name;
  drawShown();
}

/** Blocks or unblocks a cell for all heads, and repeats the request. */
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

/** The request with the selected heads, if not all are. */
function taken() {
  const some = pattern && heads.chosen.length && heads.chosen.length < pattern.heads;
  return some ? { ...composed.request, select: { heads: heads.chosen } } : composed.request;
}

async function take(act) {
  form.showProblems("take", []);
  if (!composed) return;
  try {
    $("taken").textContent = await act();
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    $("taken").textContent = "";
    if (!denied(error)) form.showProblems("take", error.problems);
  }
}

function soon() {
  clearTimeout(waiting);
  waiting = setTimeout(run, PAUSE);
}

function listen() {
  const on = (id, event, act) => $(id).addEventListener(event, act);
  on("ask", "submit", (event) => (event.preventDefault(), run()));
  for (const id of ["text", "keys"]) on(id, "input", () => (unblock(), soon()));
  on("request", "input", () => (unblock(), form.showPasted(), soon()));
  for (const id of ["left", "right", "length", "offset"]) on(id, "input", soon);
  for (const id of ["causal", "layer"]) on(id, "change", run);
  on("cross", "change", () => (unblock(), form.showMode(), run()));
  on("item", "change", () => (show(), metrics && showMetrics()));
  on("unblock", "click", () => (unblock(), run()));
  on("scale", "change", redraw);
  on("all", "click", () => (heads.switchAll(), redraw()));
  on("larger", "click", () => pattern && matrix.magnify(1.5));
  on("smaller", "click", () => pattern && matrix.magnify(1 / 1.5));
  on("block", "click", () => $("block").setAttribute("aria-pressed", String((pointing.blocking = !pointing.blocking))));
  for (const radio of document.querySelectorAll("input[name=input]")) radio.addEventListener("change", switchMode);
  for (const button of document.querySelectorAll("[data-copy], [data-figure]")) {
    const { copy: kind, figure: format } = button.dataset;
    button.addEventListener("click", () => take(() => (kind ? copy(kind, taken(), $("code")) : picture(format))));
  }
}

async function picture(format) {
  $("taken").textContent = "Drawing…";
  const figure = figureOf($("kind").value, shown, heads.chosen);
  const name = `attention-${figure.kind}.${format}`;
  await download(composed.request, { ...figure, format, theme: document.documentElement.dataset.theme, item: Number($("item").value) }, name);
  return `Downloaded ${name}`;
}

/** Switching to Request shows the request of the sentence. */
function switchMode() {
  form.showMode();
  unblock();
  if (form.mode() === "request") {
    if (!$("request").value && typeof composed?.request === "object") $("request").value = JSON.stringify(composed.request);
    form.showPasted();
  } else form.showMasks({});
  run();
}

/** Loads the layers and the vocabulary, and sends the first request; again after the key has changed. */
async function load() {
  const signal = restart();
  try {
    form.clearErrors();
    const [{ layers }, vocabulary] = await Promise.all([get("layers", signal), get("words", signal)]);
    for (const { name, spec } of layers) specs.set(name, spec);
    const [real] = vocabulary.layers;
    advice = real ? `Choose ${real} for one that does.` : vocabulary.note;
    form.showLayers(layers.map(({ name }) => name), vocabulary.layers, $("layer").value || (real ?? "default"));
  } catch (error) {
    if (error.name !== "AbortError") refuse(error);
    return;
  }
  await run();
}

follow($("theme"), redraw);
form.showMode();
listen();
followKey(load);
load();
