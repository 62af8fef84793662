// The API key: stored in this tab until it is closed, sent with every request, and never part of copied text. The field is shown after a
// 401 or 403.

import { $, inStorage } from "./dom.js";
import { setKey } from "./wire.js";

const STORED = "key";
export let key = ""; // "" for none

/** Uses the stored key and every key that is typed; calls `changed` for the latter. */
export function followKey(changed) {
  key = inStorage("sessionStorage", (storage) => storage.getItem(STORED)) ?? "";
  $("access").value = key;
  $("access-field").hidden = !key;
  setKey(key);
  const take = () => {
    key = $("access").value.trim();
    inStorage("sessionStorage", (storage) => (key ? storage.setItem(STORED, key) : storage.removeItem(STORED)));
    setKey(key);
    changed();
  };
  $("access").addEventListener("change", () => $("access").value.trim() !== key && take());
  $("access").addEventListener("keydown", (event) => event.key === "Enter" && (event.preventDefault(), take()));
}

/** Shows a refusal at the field of the key if it is about the key; returns whether it is. */
export function showKeyRefusal(error) {
  if (error.status !== 401 && !(error.status === 403 && key)) return false;
  const unknown = key ? "This server does not know the key." : "This server requires a key. Its operator makes one with attend keys add.";
  $("access-error").textContent = error.status === 401 ? unknown : `${error.problems.map(({ text }) => text).join("; ")}.`;
  $("access-field").hidden = false;
  $("access").setAttribute("aria-invalid", "true");
  $("access").focus();
  return true;
}
