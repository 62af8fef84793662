// The state of the page in the fragment of its address, so that a link or a reload shows the same. The API key is not part of it.

import { $ } from "./dom.js";
import { mode, showMasks, showPasted } from "./form.js";

const TEXTS = ["text", "keys", "request"];
const MASKS = ["left", "right", "length", "offset"];
const SWITCHES = ["causal", "special"];
const LONGEST = 16384; // characters; a longer request is left out

/** Sets the form from the address; returns the rest of the state, texts by name. */
export function readAddress() {
  const state = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  $(state.input === "request" ? "input-request" : "input-sentence").checked = true;
  for (const id of TEXTS) $(id).value = state[id] ?? $(id).defaultValue;
  $("cross").checked = "cross" in state;
  $("scale").value = state.scale ?? "head";
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
  for (const id of SWITCHES) if ($(id).checked || pasted) state.set(id, $(id).checked ? "1" : "0");
  if ($("scale").value !== "head") state.set("scale", $("scale").value);
  for (const [name, value] of Object.entries(rest)) if (value) state.set(name, value);
  if (String(state).length > LONGEST) state.delete("request");
  history.replaceState(null, "", `#${state}`);
}
