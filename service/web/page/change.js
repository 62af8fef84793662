// How the output changes where heads are switched off: for each query the length of the difference, relative to the output with all heads.

import { make } from "./dom.js";
import { showProblems } from "./form.js";
import { withoutHeads } from "./request.js";
import { attend, Refusal } from "./wire.js";

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

export class Change {
  constructor(section) {
    Object.assign(this, { section, table: section.querySelector("table"), summary: section.querySelector(".hint") });
    this.outputs = new WeakMap(); // request -> promise of its output with all heads
  }

  /** Compares the outputs of a batch item with and without the heads `off`, of `count`. `queries`: the indices and words of the rows. */
  async show(request, off, count, item, queries) {
    const shown = (this.shown = {});
    this.section.hidden = !off.length;
    this.table.replaceChildren();
    this.summary.textContent = "";
    showProblems("change", []);
    if (!off.length) return;
    try {
      if (!this.outputs.has(request)) this.outputs.set(request, output(request));
      const [all, some] = await Promise.all([this.outputs.get(request), output(withoutHeads(request, off, count))]);
      if (this.shown !== shown) return;
      const rows = relativeChange(all.data, some.data, all.shape.at(-1)).slice(item * all.shape.at(-2), (item + 1) * all.shape.at(-2));
      this.fill(off, queries.map(([index, word]) => [word, rows[index]]));
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      this.outputs.delete(request);
      if (this.shown === shown) showProblems("change", error.problems);
    }
  }

  fill(off, rows) {
    const known = rows.flatMap(([, change]) => (change === null ? [] : [change]));
    const most = Math.max(...known, 0) || 1;
    const mean = known.reduce((sum, change) => sum + change, 0) / (known.length || 1);
    this.summary.textContent = `without ${off.length === 1 ? "head" : "heads"} ${off.join(", ")}: ${percent(mean)} different`;
    const line = ([word, change]) => {
      const number = make("td", { textContent: change === null ? "–" : percent(change) });
      number.style.setProperty("--share", `${(100 * (change ?? 0)) / most}%`);
      return make("tr", {}, make("th", { scope: "row", textContent: word }), number);
    };
    this.table.replaceChildren(make("tbody", {}, ...rows.map(line)));
  }
}

async function output(request) {
  return (await attend(request, ["output"])).tensors.output;
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;
