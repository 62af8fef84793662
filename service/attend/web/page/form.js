// The form: values of the controls, the state of the page in its address, refusals of the service next to the control they are about, and the
// API key.

import { $, inStorage, make } from "./dom.js";
import { apiKey, Refusal, setApiKey } from "./wire.js";

// Member of a request -> field of the form whose refusals are shown there; "" is the whole body, "*" any other member.
const FIELDS = { layer: "layer", causal: "causal", window: "window", valid_lens: "length", query_offset: "offset", block_mask: "cells", attend_mask: "cells" };
const FIELDS_OF_PASTED = { "*": "request", "": "request" };
const FIELDS_OF_SENTENCE = { query: "text", tokens: "text", key: "keys", value: "keys" };
const CONTROLS = { window: ["left", "right"], cells: [] }; // of a field, if not one of the same name
const TEXTS = ["text", "keys", "request"];
const MASKS = ["left", "right", "length", "offset"];
const SWITCHES = ["causal", "special"];
const IN_FORM = [ // of a refusal of the service, and of the form
  [/an integer of 32 bits, a list of them, or "end"/, "a whole number, or end, as the query offset"],
  [/an offset \(0, "end", …\), since (.+?) is on.* and (\d+) queries and (\d+) keys are given, got nothing/, "a query offset, such as 0 or end: $1 needs it, since there are $2 queries and $3 keys"],
  [/a tensor(?=, got)/, "a whole number of real keys"],
  [/at most (\d+), the number of keys/, "at most $1 real keys, since there are no more keys"],
];
const TOO_LONG = /at most (\d+) (words|tokens|word pieces).* got (\d+)/s; // of a text
const WORDS = /[\p{L}\p{N}_]+|[^\p{L}\p{N}_\s]/gu; // and punctuation marks, as the service counts them
const LONGEST = 16384; // characters; a longer request is left out
const LONG = 64; // keys; each has few hundredths of a row of a longer text
const STORED_KEY = "key"; // its name in the storage of the browser

const captured = new Map(); // layer -> text of the request with the inputs that its model gave it
const effects = new Map(); // layer -> what each head of its model does to the answer, if the capture has it
const own = []; // models whose folders were dropped on the page, as in GET /words
let models = []; // of GET /words, and these
let usual = {}; // fields of a request, as the model of the chosen layer has them in its own calls

/** What the user enters: "sentence" or "request". */
export function mode() {
  return document.querySelector("input[name=input]:checked").value;
}

export function showMode() {
  $("sentence").hidden = mode() !== "sentence";
  $("pasted").hidden = mode() !== "request";
  $("second").hidden = !$("cross").checked;
}

/** The values of the mask controls; null if empty. Text that is no number is sent unchanged, for the service to refuse. */
export function masks(blocked) {
  const [left, right] = [number("left"), number("right")];
  const window = left === null && right === null ? null : { left, right };
  return { causal: $("causal").checked, window, length: number("length"), offset: number("offset"), blocked };
}

/** Sets the mask controls from a pasted request. Lists cannot be shown and stay in the request. */
export function showMasks(request) {
  $("causal").checked = request.causal === true;
  $("left").value = request.window?.left ?? "";
  $("right").value = request.window?.right ?? "";
  for (const [id, value] of [["length", request.valid_lens], ["offset", request.query_offset]]) {
    const single = typeof value !== "object";
    $(id).value = single ? (value ?? "") : "";
    $(id).disabled = !single && value !== null;
    $(id).placeholder = $(id).disabled ? "as in the request" : id === "length" ? "all" : "none";
  }
}

/** Sets the controls from the pasted request. */
export function showPasted() {
  try {
    const body = JSON.parse($("request").value);
    showMasks(body);
    $("special").checked = body.tokens?.omit === "special";
    showLayer(String(body.layer ?? "default"));
  } catch {
    // not JSON yet
  }
}

function number(id) {
  if ($(id).disabled) return undefined;
  const text = $(id).value.trim();
  if (text === "") return null;
  return /^-?\d+$/.test(text) ? Number(text) : text;
}

/** Sets the form from the address; returns the rest of the state, texts by name. */
export function readAddress() {
  const state = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  $(state.input === "request" ? "input-request" : "input-sentence").checked = true;
  for (const id of TEXTS) $(id).value = state[id] ?? $(id).defaultValue;
  $("cross").checked = "cross" in state;
  $("scale").value = state.scale ?? "head";
  $("scale").dataset.chosen = state.scale ? "1" : "";
  $("special").checked = false;
  if (mode() === "request") showPasted();
  else showMasks({});
  for (const id of MASKS) $(id).value = state[id] ?? $(id).value;
  for (const id of SWITCHES) if (id in state) $(id).checked = state[id] === "1";
  return state;
}

/** Writes the visible controls and `rest`, texts by name, where they differ from the page's first state or from a pasted request. */
export function writeAddress(rest) {
  const state = new URLSearchParams({ layer: $("layer").value });
  const pasted = mode() === "request"; // has masks of its own, which empty controls remove
  if (pasted) state.set("input", "request");
  for (const id of TEXTS) if ($(id).value !== $(id).defaultValue && $(id).offsetParent) state.set(id, $(id).value);
  if ($("cross").checked) state.set("cross", "1");
  for (const id of MASKS) if ($(id).value || (pasted && !$(id).disabled)) state.set(id, $(id).value);
  for (const id of SWITCHES) if ($(id).checked !== Boolean(usual[id]) || pasted) state.set(id, $(id).checked ? "1" : "0");
  if ($("scale").dataset.chosen) state.set("scale", $("scale").value);
  for (const [name, value] of Object.entries(rest)) if (value) state.set(name, value);
  if (String(state).length > LONGEST) state.delete("request");
  history.replaceState(null, "", `#${state}`);
}

/** Keeps the request with the inputs that its model gave a layer, and what each head of the model does to its answer, or null. */
export function keepCaptured(request, ofHeads) {
  captured.set(request.layer, JSON.stringify(request));
  effects.set(request.layer, ofHeads);
}

/** What each head of the model of a captured layer does to its answer; null if that is not known. */
export function effectsOf(layer) {
  return effects.get(layer) ?? null;
}

/** Shows the inputs that its model gave a layer, if they are known. */
export function showCaptured(layer) {
  if (!captured.has(layer)) return;
  $("input-request").checked = true;
  $("request").value = captured.get(layer);
  showMode();
  showPasted();
}

/** The text of the request for a layer: what is pasted, or for another than the chosen layer, the inputs that its model gave it. */
export function pasted(layer) {
  return (layer !== $("layer").value && captured.get(layer)) || $("request").value;
}

/** Whether a text is the request with the inputs that its model gave a layer. */
export function isCaptured(layer, text) {
  return captured.get(layer) === text;
}

/** The colour scale. Unless the user has chosen one, it is logarithmic for texts whose single weights would be too pale on a linear one. */
export function showScale(keys) {
  if (!$("scale").dataset.chosen) $("scale").value = keys > LONG ? "log" : "head";
}

/** Keeps the scale that the user has chosen, also for other texts. */
export function keepScale() {
  $("scale").dataset.chosen = "1";
}

/** Selects a layer, and adds it if it is not in the list: the service may have it. */
export function showLayer(name) {
  if (![...$("layer").options].some((option) => option.value === name)) $("layer").append(new Option(name, name));
  $("layer").value = name;
}

/** The names in the list of layers. */
export function layerNames() {
  return [...$("layer").options].map(({ value }) => value);
}

/** Keeps a model whose folder was dropped on the page: {title, layers, options}. Another of that title is forgotten. */
export function keepModel(model) {
  own.splice(0, own.length, ...own.filter(({ title }) => title !== model.title), model);
}

/** Fills the list of layers: those of trained models, which are loaded on first use, and the others on the server. */
export function showLayers(loaded, trained, chosen) {
  models = [...trained, ...own];
  const group = (label, names) => make("optgroup", { label }, ...names.map((name) => new Option(name, name)));
  const others = loaded.filter((name) => !modelOf(name));
  const groups = models.map(({ title, layers }) => group(title, layers));
  $("layer").replaceChildren(...groups, ...(others.length ? [group("On this server", others)] : []));
  showLayer(chosen);
}

/**
 * For a sentence, sets the controls to the model's own calls of the chosen layer, where they are as they were for the layer before. Between two
 * sentences there is no order of positions, so nothing is causal.
 */
export function showUsual() {
  const options = (mode() === "sentence" && !$("cross").checked && modelOf($("layer").value)?.options) || {};
  if (mode() === "sentence" && $("causal").checked === Boolean(usual.causal)) $("causal").checked = Boolean(options.causal);
  usual = options;
}

function modelOf(layer) {
  return models.find(({ layers }) => layers.includes(layer));
}

/** Removes all refusals. */
export function clearErrors() {
  for (const element of document.querySelectorAll(".error")) element.textContent = "";
  for (const element of document.querySelectorAll("[aria-invalid]")) element.removeAttribute("aria-invalid");
  $("problem").hidden = true;
}

/**
 * Runs `act`; shows its refusal at a field, without marking a control as invalid, or at that of the API key, while `isShown()`. Returns
 * whether it succeeded.
 */
export async function attempt(field, act, isShown = () => true) {
  const place = $(`${field}-error`);
  place.textContent = "";
  try {
    await act();
    return true;
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    if (isShown() && !showKeyRefusal(error)) place.textContent = error.problems.map(problemText).join("; ");
    return false;
  }
}

/** A problem and its place. */
const problemText = ({ at, text }) => `${text}${at ? `, at ${at}` : ""}`;

/** A problem of a mask as the form calls things. */
const inFormWords = (text) => IN_FORM.reduce((all, [service, form]) => all.replace(service, form), text);

/**
 * Shows a refusal of the request: each problem at its field; above the result the others, or that there are some. `error.fields` maps further
 * members to fields.
 */
export function showRefusal(error) {
  if (showKeyRefusal(error)) return;
  const isOfServer = error.status === 0 || error.status === 429 || error.status >= 500; // not the fault of a field
  const fields = { ...FIELDS, ...(isOfServer ? {} : mode() === "request" ? FIELDS_OF_PASTED : FIELDS_OF_SENTENCE), ...error.fields };
  const rest = [];
  for (const problem of error.problems) {
    const own = fields[problem.at.split("/")[1] ?? ""];
    const field = own ?? fields["*"];
    if (field) showAt(field, problem, own === undefined);
    else rest.push(problemText(problem));
  }
  $("problem").textContent = rest.join("; ") || "Refused: the reason is beside its field.";
  $("problem").hidden = false;
}

/** Shows a problem at a field; with its pointer if `always`, as in a text with many fields, or if it is about a part of the field. */
function showAt(field, { at, text }, always) {
  const place = $(`${field}-error`);
  const [, , part, ...deeper] = at.split("/");
  const single = (CONTROLS[field] ?? []).includes(part) && !deeper.length; // the control itself shows the place
  const shown = `${problemText({ at: always || (part && !single) ? at : "", text: MASKS.includes(field) ? inFormWords(text) : text })}.`;
  place.textContent = [place.textContent, shown].filter(Boolean).join(" ");
  const [, most, units, got] = field === "text" || field === "keys" ? (TOO_LONG.exec(text) ?? []) : [];
  const way = units === "words" ? `Keep the first ${most} words` : "Cut the text to fit";
  if (most) place.append(" ", make("button", { type: "button", className: "small", textContent: way, onclick: () => shorten(field, most / got) }));
  for (const id of single ? [part] : (CONTROLS[field] ?? [field])) $(id).setAttribute("aria-invalid", "true");
}

/** Keeps the first words of a text, so large a share of them, at least one. Of a text that has other tokens than words it may have to be done again. */
function shorten(field, share) {
  const words = [...$(field).value.matchAll(WORDS)];
  const last = words[Math.max(0, Math.floor(words.length * share) - 1)];
  $(field).value = $(field).value.slice(0, last.index + last[0].length);
  $(field).dispatchEvent(new Event("input"));
}

/**
 * Uses the API key that was typed, and calls `changed` after it was typed. It is stored in this tab until it is closed, and never part of copied
 * text or of the address.
 */
export function followApiKey(changed) {
  const stored = inStorage("sessionStorage", (storage) => storage.getItem(STORED_KEY)) ?? "";
  $("api-key").value = stored;
  $("api-key-field").hidden = !stored;
  setApiKey(stored);
  const take = () => {
    setApiKey($("api-key").value.trim());
    inStorage("sessionStorage", (storage) => (apiKey ? storage.setItem(STORED_KEY, apiKey) : storage.removeItem(STORED_KEY)));
    changed();
  };
  $("api-key").addEventListener("change", () => $("api-key").value.trim() !== apiKey && take());
  $("api-key").addEventListener("keydown", (event) => event.key === "Enter" && (event.preventDefault(), take()));
}

/** Shows a refusal at the field of the API key, which is hidden until then, if it is about the key; returns whether it is. */
function showKeyRefusal(error) {
  if (error.status !== 401 && !(error.status === 403 && apiKey)) return false;
  const unknown = apiKey ? "This server does not know the key." : "This server requires a key. Its operator makes one with attend keys add.";
  $("api-key-error").textContent = error.status === 401 ? unknown : `${error.problems.map(({ text }) => text).join("; ")}.`;
  $("api-key-field").hidden = false;
  $("api-key").setAttribute("aria-invalid", "true");
  $("api-key").focus();
  return true;
}
