// How the output changes where heads are switched off: for each query the length of the difference, relative to the output with all heads.

import { bars, make } from "./dom.js";
import { attempt } from "./form.js";
import { withoutHeads } from "./request.js";
import { cachedTensors } from "./wire.js";

/** ‖a − b‖ / ‖a‖ of rows of `width` numbers; null where a is zero. */
export function relativeChange(a, b, width) {
  return Array.from({ length: a.length / width }, (_, i) => {
    let [difference, size] = [0, 0];
    for (let j = i * width; j < (i + 1) * width; j++) {
      difference += (a[j] - b[j]) ** 2;
      size += a[j] ** 2;
    }
    return size ? Math.sqrt(difference / size) : null;
  });
}

export class OutputChange {
  constructor(section) {
    Object.assign(this, { section, table: section.querySelector("table"), summary: section.querySelector(".hint") });
  }

  /** Compares the outputs of a batch item with and without the heads `off`, of `count`. `queries`: the indices and words of the rows. */
  async show(request, off, count, item, queries) {
    const shown = (this.shown = {});
    this.section.hidden = !off.length;
    this.table.replaceChildren();
    this.summary.textContent = "";
    if (!off.length) return;
    const compare = async () => {
      const [all, some] = await Promise.all([request, withoutHeads(request, off, count)].map((body) => cachedTensors(body, ["output"])));
      const [rows, width] = all.output.shape.slice(-2);
      const changes = relativeChange(all.output.data, some.output.data, width).slice(item * rows, (item + 1) * rows);
      if (this.shown === shown) this.fill(off, queries.map(([, word]) => word), queries.map(([index]) => changes[index]));
    };
    await attempt("change", compare, () => this.shown === shown);
  }

  fill(off, words, changes) {
    const defined = changes.filter((change) => change !== null);
    const mean = defined.reduce((sum, change) => sum + change, 0) / (defined.length || 1);
    this.summary.textContent = `without ${off.length === 1 ? "head" : "heads"} ${off.join(", ")}: ${percent(mean)} different`;
    const rows = bars(changes, percent).map((cell, i) => make("tr", {}, make("th", { scope: "row", textContent: words[i] }), cell));
    this.table.replaceChildren(make("tbody", {}, ...rows));
  }
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;
