// Light or dark: as the system says, or as chosen here and remembered.

import { choose } from "./colours.js";

/** Follows `select` and the system; `changed` is told after each change. */
export function follow(select, changed) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const theme = select.value || (dark.matches ? "dark" : "light");
    document.documentElement.dataset.theme = theme;
    choose(theme);
    changed();
  };
  select.value = remembered((storage) => storage.getItem("theme")) ?? "";
  select.addEventListener("change", () => {
    remembered((storage) => storage.setItem("theme", select.value));
    apply();
  });
  dark.addEventListener("change", apply);
  apply();
}

/** What `act` finds in the storage; undefined where the browser keeps none for this page. */
function remembered(act) {
  try {
    return act(localStorage);
  } catch {
    return undefined;
  }
}
