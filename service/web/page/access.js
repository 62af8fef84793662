// The API key, for a server that asks for one: typed here, sent with every request, and kept by this tab alone until it is closed. Nothing
// that is copied holds it. The field is shown once the server has asked.

import { present } from "./wire.js";

const STORED = "key";
const $ = (id) => document.getElementById(id);
let key = "";

/** Takes the key that this tab has kept, and each that is typed; `changed` is told of those. */
export function followKey(changed) {
  key = kept((storage) => storage.getItem(STORED)) ?? "";
  $("access").value = key;
  $("access-field").hidden = !key;
  present(key);
  const take = () => {
    key = $("access").value.trim();
    kept((storage) => (key ? storage.setItem(STORED, key) : storage.removeItem(STORED)));
    present(key);
    changed();
  };
  $("access").addEventListener("change", () => $("access").value.trim() !== key && take());
  $("access").addEventListener("keydown", (event) => event.key === "Enter" && (event.preventDefault(), take()));
}

/** Whether a key goes with the requests. */
export function hasKey() {
  return key !== "";
}

/** Whether a refusal is about the key; it is then said at the field. */
export function denied(error) {
  if (error.status !== 401 && !(error.status === 403 && key)) return false;
  const unknown = key ? "This server does not know the key." : "This server asks for a key. Whoever runs it makes one with attend keys add.";
  $("access-error").textContent = error.status === 401 ? unknown : `${error.problems.map(({ text }) => text).join("; ")}.`;
  $("access-field").hidden = false;
  $("access").setAttribute("aria-invalid", "true");
  $("access").setAttribute("aria-describedby", "access-error access-hint");
  $("access").focus();
  return true;
}

/** What `act` finds in the storage; undefined where the browser keeps none for this page. */
function kept(act) {
  try {
    return act(sessionStorage);
  } catch {
    return undefined;
  }
}
