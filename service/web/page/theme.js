// Light or dark: from the system, or chosen here and stored.

import { choose } from "./colours.js";
import { inStorage } from "./dom.js";

/** Follows `select` and the system; calls `changed` after each change. */
export function followTheme(select, changed) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const theme = select.value || (dark.matches ? "dark" : "light");
    document.documentElement.dataset.theme = theme;
    choose(theme);
    changed();
  };
  select.value = inStorage("localStorage", (storage) => storage.getItem("theme")) ?? "";
  select.addEventListener("change", () => {
    inStorage("localStorage", (storage) => storage.setItem("theme", select.value));
    apply();
  });
  dark.addEventListener("change", apply);
  apply();
}
