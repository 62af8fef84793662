// The page: controls -> request -> service -> views. This file connects:
//
//   form.js        the controls, the address, refusals beside the controls, the API key
//   request.js     the body of POST /attend from the controls
//   wire.js        HTTP: requests, replies, refusals
//   views.js       connects the views of one reply: heads.js, effects.js, matrix.js and words.js (with pointing.js), statistics.js, steps.js
//                  (with cell.js and equations.js), decoding.js;
//                  weights.js has what they draw, colours.js the colours
//   export.js      copies the request, downloads figures
//   upload.js      adds layers from files; embeddings.js makes the inputs of a model's first layer from its folder; tensors.js reads numbers

import { followTheme } from "./colours.js";
import { $ } from "./dom.js";
import { copyRequest, downloadFigure, figureOf, scaleOf } from "./export.js";
import * as form from "./form.js";
import { compose, effectsOf, specOf, specs, withoutHeads } from "./request.js";
import { LINKS } from "./statistics.js";
import { followFiles } from "./upload.js";
import { Views } from "./views.js";
import { attend, get, post, Refusal } from "./wire.js";

const PAUSE = 300; // ms after the last key until the request is sent

const blocked = new Set(); // "q,k", counted with special tokens
const views = new Views(blocked, block, saveState, openHead); // has the last request and its reply
let [running, waiting] = [null, 0]; // AbortController of what runs, or null; timer of the next request
let advice = null; // which trained layer to choose or install; null until the layers are loaded
let savedState = {}; // state from the address, for the next reply

async function run() {
  if (advice === null) return await load();
  const signal = restart();
  $("result").setAttribute("aria-busy", "true");
  try {
    form.clearErrors();
    const composed = await compose($("layer").value, blocked, signal);
    const reply = await weightsOf(composed.request, signal);
    performance.mark("attend:reply");
    showReply(composed, reply);
    requestAnimationFrame(() => setTimeout(() => performance.measure("attend:paint", "attend:reply")));
    await analyse(composed.request, signal);
    await showModel(composed, reply, signal);
  } catch (error) {
    if (error.name !== "AbortError") showRefusal(error);
  } finally {
    if (running?.signal === signal) end();
  }
}

/** Stops what is waiting or running; returns the signal for the next run. */
function restart() {
  clearTimeout(waiting);
  running?.abort();
  running = new AbortController();
  return running.signal;
}

function end() {
  running = null;
  $("result").setAttribute("aria-busy", "false");
}

/** {weights, shape, layer, spec, timing} of a request; shape is [b, h, q, k]. */
async function weightsOf(request, signal) {
  const { tensors, layer, timing } = await attend(request, ["attention_weights"], signal);
  const { shape, data } = tensors.attention_weights;
  if (!data.length) throw new Refusal(422, "There is nothing to show: no queries, or no keys");
  return { weights: data, shape: shape.length === 3 ? [1, ...shape] : shape, layer, spec: await specOf(layer.name, signal), timing };
}

/** Shows a refusal. What is shown of the request before is greyed, and cannot be used any more. */
function showRefusal(error) {
  if (!(error instanceof Refusal)) throw error;
  $("shown").inert = true;
  $("summary").textContent = $("layer-about").textContent = "";
  form.showRefusal(error);
}

/** Shows a reply in place of the last one. */
function showReply(composed, reply) {
  $("shown").inert = false;
  $("code").hidden = true;
  $("export-status").textContent = "";
  views.showReply(composed, reply, savedState);
  savedState = {};
  showSummary(composed, reply);
  saveState();
}

function showSummary(composed, reply) {
  const { shape: [, count, queries, keys], spec, layer, timing } = reply;
  const compute = /compute;dur=([\d.]+)/.exec(timing)?.[1];
  $("summary").textContent = `${count} heads, ${queries} queries × ${keys} keys${compute ? `, computed in ${Number(compute).toFixed(1)} ms` : ""}`;
  $("layer-about").textContent = `${spec.num_heads} heads, ${spec.d_model} wide, ${layer.fingerprint.slice(0, 12)}`;
  const note = composed.note;
  const between = note?.meaningful && composed.cross ? " The model itself never uses them between two sentences." : "";
  $("note").textContent = note ? note.note + between + (note.meaningful || note.needs ? "" : ` ${advice}`) : "";
  $("note").classList.toggle("warn", Boolean(note && (!note.meaningful || composed.cross)));
  $("note").hidden = !note;
}

/** Head statistics, or the service's reason why they are not defined for this request. */
async function analyse(request, signal) {
  const body = { ...request, analysis: { top_links: LINKS } };
  const compute = async () => views.showMetrics((await (await post("attend/analysis", body, { signal })).json()).metrics);
  if (!(await form.attempt("numbers", compute))) views.showMetrics(null);
}

/** Shows all layers of the model, if the user has opened that view: each gets the same sentence or request. Then the effects of their heads. */
async function showModel(composed, reply, signal) {
  for (const name of views.model.isOpen ? views.model.rows.keys() : []) {
    try {
      const { request, note } = await compose(name, blocked, signal);
      if (note?.needs) views.model.show(name, null, $("scale").value, note.needs);
      else views.model.show(name, name === reply.layer.name ? reply : await weightsOf(request, signal), $("scale").value);
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      views.model.show(name, null, $("scale").value, error.message);
    }
  }
  if (views.model.isOpen) views.effects.show(await effectsOf(composed, [...views.model.rows.keys()], signal));
}

function openHead(layer, head = views.shown) {
  views.choice = head;
  form.showLayer(layer);
  form.showCaptured(layer);
  form.showUsual();
  run();
}

/** Writes the state of the page into its address. */
function saveState() {
  if (views.reply) form.writeAddress({ ...views.state(), blocked: [...blocked].join(" ") });
}

/** Sets the page to the state in its address. */
function restoreState() {
  savedState = form.readAddress();
  blocked.clear();
  for (const [cell] of (savedState.blocked ?? "").matchAll(/\d+,\d+/g)) blocked.add(cell);
  showBlocked();
  views.reset();
  views.model.details.open = "model" in savedState;
  form.showMode();
  if (savedState.layer) form.showLayer(savedState.layer);
}

/** Blocks or unblocks a cell for all heads, and repeats the request. */
function block([q, k]) {
  const cell = `${q},${k}`;
  if (!blocked.delete(cell)) blocked.add(cell);
  const { query, key } = views.labels;
  $("live").textContent = `${query[q]} to ${key[k]} ${blocked.has(cell) ? "blocked" : "free"}`;
  showBlocked();
  run();
}

function showBlocked() {
  $("blocked").textContent = `${blocked.size} single ${blocked.size === 1 ? "cell" : "cells"} blocked`;
  $("cells").hidden = !blocked.size;
  views.matrix.draw();
}

function unblock() {
  blocked.clear();
  showBlocked();
}

/** The request for the weights and the output of the heads that are on. */
function requestOfHeads() {
  const { composed, heads: { off, chosen, count } } = views;
  if (!off.length) return composed.request;
  const request = withoutHeads(composed.request, off, count);
  return chosen.length ? { ...request, select: { heads: chosen } } : request;
}

async function attemptExport(act) {
  const succeeded = await form.attempt("export", async () => views.reply && ($("export-status").textContent = await act()));
  if (!succeeded) $("export-status").textContent = "";
}

async function exportFigure(format) {
  $("export-status").textContent = "Drawing…";
  const named = figureOf($("kind").value, views.shown, views.heads.chosen);
  const figure = { ...named, ...scaleOf($("scale").value, named.kind) };
  const name = `attention-${figure.kind}.${format}`;
  await downloadFigure(views.composed.request, { ...figure, format, theme: document.documentElement.dataset.theme, item: views.item }, name);
  return `Downloaded ${name}${$("scale").value === "row" && figure.kind === "heads" ? ", with a scale for each head: pictures have none for rows" : ""}`;
}

function runSoon() {
  clearTimeout(waiting);
  waiting = setTimeout(run, PAUSE);
}

function listen() {
  const on = (id, event, act) => $(id).addEventListener(event, act);
  const onEach = (selector, event, act) => document.querySelectorAll(selector).forEach((element) => element.addEventListener(event, () => act(element)));
  on("controls", "submit", (event) => (event.preventDefault(), run()));
  for (const id of ["text", "keys"]) on(id, "input", () => (unblock(), runSoon()));
  onEach("[data-example]", "click", ({ dataset }) => (($("text").value = dataset.example), unblock(), run()));
  on("request", "input", () => (unblock(), form.showPasted(), runSoon()));
  for (const id of ["left", "right", "length", "offset"]) on(id, "input", runSoon);
  for (const id of ["causal", "special"]) on(id, "change", run);
  on("layer", "change", () => (form.showCaptured($("layer").value), form.showUsual(), run()));
  on("cross", "change", () => (unblock(), form.showMode(), form.showUsual(), run()));
  on("item", "change", () => (views.show(), saveState()));
  on("unblock", "click", () => (unblock(), run()));
  on("scale", "change", () => (form.keepScale(), views.redraw(), saveState()));
  on("all", "click", () => views.switchAllOn());
  on("larger", "click", () => views.reply && views.matrix.magnify(1.5));
  on("smaller", "click", () => views.reply && views.matrix.magnify(1 / 1.5));
  on("block", "click", () => $("block").setAttribute("aria-pressed", String((views.pointing.blocking = !views.pointing.blocking))));
  onEach("input[name=input]", "change", switchMode);
  onEach("[data-copy]", "click", ({ dataset }) => attemptExport(() => copyRequest(dataset.copy, requestOfHeads(), views.composed.texts, $("code"))));
  onEach("[data-figure]", "click", ({ dataset }) => attemptExport(() => exportFigure(dataset.figure)));
  views.model.details.addEventListener("toggle", () => views.reply && !running && run()); // what runs shows the view at its end
  window.addEventListener("hashchange", () => (restoreState(), run()));
}

/** Switching to Request shows the request of the sentence. */
function switchMode() {
  form.showMode();
  unblock();
  if (form.mode() === "request") {
    if (!$("request").value && views.composed) $("request").value = JSON.stringify(views.composed.request);
    form.showPasted();
  } else form.showMasks({});
  form.showUsual();
  run();
}

/** Loads the layers and the vocabulary, and sends the first request; again after the key has changed. */
async function load() {
  const signal = restart();
  try {
    form.clearErrors();
    const [{ layers }, vocabulary, { limits }] = await Promise.all([get("layers", signal), get("words", signal), get("./", signal)]);
    views.decoding.isOffered = limits.session_memory > 0;
    specs.clear();
    for (const { name, spec } of layers) specs.set(name, spec);
    const [model] = vocabulary.models;
    advice = model ? `Choose ${model.first} for one that does.` : vocabulary.note;
    const names = layers.map(({ name }) => name);
    form.showLayers(names, vocabulary.models, $("layer").value || model?.first || (names.includes("default") ? "default" : names[0]));
    if (!("causal" in savedState)) form.showUsual();
  } catch (error) {
    if (error.name === "AbortError") return;
    running = null;
    showRefusal(error);
    return;
  }
  await run();
}

followTheme($("theme"), () => views.redraw());
restoreState();
listen();
form.followApiKey(load);
followFiles((name) => {
  form.showLayer(name);
  form.showCaptured(name);
  if (form.effectsOf(name)) views.model.details.open = true; // with the map of the effects of heads
  load();
});
load();
