// The controls: what they say, and the service's refusals beside the control they are about.

const $ = (id) => document.getElementById(id);
const FIELDS = { layer: "layer", causal: "causal", window: "window", valid_lens: "length", query_offset: "offset", block_mask: "cells", attend_mask: "cells" };
const CONTROLS = { window: ["left", "right"], cells: [] }; // of a field, where it is not one of the same name

/** "sentence" or "request". */
export function mode() {
  return document.querySelector("input[name=input]:checked").value;
}

export function value(id) {
  return $(id).value;
}

export function isChecked(id) {
  return $(id).checked;
}

export function showMode() {
  $("sentence").hidden = mode() !== "sentence";
  $("pasted").hidden = mode() !== "request";
  $("second").hidden = !$("cross").checked;
}

/** What the mask controls say. null: not set; a text that is no number goes to the service as it is, which will say what it expects. */
export function masks(blocked) {
  const [left, right] = [number("left"), number("right")];
  const window = left === null && right === null ? null : { left, right };
  return { causal: $("causal").checked, window, length: number("length"), offset: number("offset"), blocked };
}

/** Sets the controls to what a pasted request says. Lists, which they cannot show, are left to the request. */
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

/** A pasted request brings its masks and its layer to the controls. */
export function showPasted() {
  try {
    const body = JSON.parse($("request").value);
    showMasks(body);
    showLayer(String(body.layer ?? "default"));
  } catch {
    // no JSON yet: what is wrong with it, the service says when it is asked
  }
}

function number(id) {
  if ($(id).disabled) return undefined;
  const text = $(id).value.trim();
  if (text === "") return null;
  return /^-?\d+$/.test(text) ? Number(text) : text;
}

/** Takes all refusals away. */
export function clearErrors() {
  for (const element of document.querySelectorAll(".error")) element.textContent = "";
  for (const element of document.querySelectorAll("[aria-invalid]")) {
    element.removeAttribute("aria-invalid");
    element.removeAttribute("aria-describedby");
  }
  $("problem").hidden = true;
}

/** Says, or with no problems no longer says, what is wrong with something that leaves the controls as they are. */
export function sayOf(field, problems) {
  $(`${field}-error`).textContent = problems.map(({ at, text }) => `${text}${at ? `, at ${at}` : ""}`).join("; ");
}

/** Puts each problem beside its field; `fields` maps further pointers to fields. What belongs to none is shown above the result. */
export function showErrors(problems, fields) {
  const known = { ...FIELDS, ...fields };
  const rest = [];
  for (const { at, text } of problems) {
    const own = known[at.split("/")[1] ?? ""];
    const field = own ?? known["*"];
    if (field && $(`${field}-error`)) sayAt(field, at, text, own === undefined);
    else rest.push(`${text}${at ? `, at ${at}` : ""}`);
  }
  $("problem").textContent = rest.join("; ");
  $("problem").hidden = !rest.length;
}

/** `always` says the place even where it is the whole of a field: that of a text which holds many. */
function sayAt(field, at, text, always) {
  const place = $(`${field}-error`);
  const [, , part, ...deeper] = at.split("/");
  const single = (CONTROLS[field] ?? []).includes(part) && !deeper.length; // one of several controls: no need to point there
  place.textContent = [place.textContent, `${text}${at && (always || (part && !single)) ? `, at ${at}` : ""}.`].filter(Boolean).join(" ");
  for (const id of single ? [part] : (CONTROLS[field] ?? [field])) {
    $(id).setAttribute("aria-invalid", "true");
    $(id).setAttribute("aria-describedby", place.id);
  }
}

/** Chooses a layer; one that is not among those offered too, since the service may still know it, or will say that it does not. */
export function showLayer(name) {
  if (![...$("layer").options].some((option) => option.value === name)) $("layer").append(new Option(name, name));
  $("layer").value = name;
}

/** Fills the choice of layers: those held, and those of the real model, which are made when first asked for. */
export function showLayers(held, model, chosen) {
  const group = (label, names) => {
    const element = document.createElement("optgroup");
    element.label = label;
    element.append(...names.map((name) => new Option(name, name)));
    return element;
  };
  const others = held.filter((name) => !model.includes(name));
  const groups = [...(model.length ? [group("all-MiniLM-L6-v2", model)] : []), ...(others.length ? [group("On this server", others)] : [])];
  $("layer").replaceChildren(...groups);
  if ([...model, ...others].includes(chosen)) $("layer").value = chosen;
}
