// The form: values of the controls, and refusals of the service next to the control they are about.

import { showKeyRefusal } from "./access.js";
import { $, make } from "./dom.js";
import { Refusal } from "./wire.js";

const FIELDS = { layer: "layer", causal: "causal", window: "window", valid_lens: "length", query_offset: "offset", block_mask: "cells", attend_mask: "cells" };
const CONTROLS = { window: ["left", "right"], cells: [] }; // of a field, if not one of the same name

/** "sentence" or "request". */
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

/** Shows each problem at its field; `fields` maps further pointers to fields. Above the result are the others, or that there are some. */
export function showErrors(problems, fields) {
  const known = { ...FIELDS, ...fields };
  const rest = [];
  for (const problem of problems) {
    const own = known[problem.at.split("/")[1] ?? ""];
    const field = own ?? known["*"];
    if (field && $(`${field}-error`)) showAt(field, problem, own === undefined);
    else rest.push(problemText(problem));
  }
  $("problem").textContent = rest.join("; ") || "Refused: the reason is beside its field.";
  $("problem").hidden = false;
}

/** `always`: show the pointer even for a whole field, as in a text with many fields. */
function showAt(field, { at, text }, always) {
  const place = $(`${field}-error`);
  const [, , part, ...deeper] = at.split("/");
  const single = (CONTROLS[field] ?? []).includes(part) && !deeper.length; // the control itself shows the place
  const shown = `${problemText({ at: always || (part && !single) ? at : "", text })}.`;
  place.textContent = [place.textContent, shown].filter(Boolean).join(" ");
  for (const id of single ? [part] : (CONTROLS[field] ?? [field])) $(id).setAttribute("aria-invalid", "true");
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

/** Fills the list of layers: those of the server, and those of the real model, which are loaded on first use. */
export function showLayers(loaded, model, chosen) {
  const group = (label, names) => make("optgroup", { label }, ...names.map((name) => new Option(name, name)));
  const others = loaded.filter((name) => !model.includes(name));
  const groups = [...(model.length ? [group("all-MiniLM-L6-v2", model)] : []), ...(others.length ? [group("On this server", others)] : [])];
  $("layer").replaceChildren(...groups);
  showLayer(chosen);
}
