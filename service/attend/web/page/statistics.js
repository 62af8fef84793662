// Tables about heads. `HeadStatistics`: a row for each head, from the reply of POST /attend/analysis; for formulas see docs/heads.md.
// `OutputChange`: how the output changes by the heads that are off.

import { make, markCut } from "./dom.js";
import { attempt } from "./form.js";
import { isSpecial, withoutHeads } from "./request.js";
import { cachedTensors } from "./wire.js";

const COLUMNS = [ // name, title, digits, what it is
  ["entropy", "Entropy", 2, "−Σ a ln a over the keys, in nats, mean over queries: small where a head looks at few words"],
  ["confidence", "Confidence", 2, "a row's largest weight, mean over queries"],
  ["mean_distance", "Distance", 1, "from query to key in words, weighted by attention"],
  ["self_share", "Self", 2, "share of attention that a word gives to itself"],
  ["previous_token_score", "Previous", 2, "share given to the word before"],
  ["first_key_mass", "First", 2, "share given to the first word"],
  ["duplicate_token_score", "Same", 2, "share that a word which came before gives to where it came"],
  ["induction_score", "Next", 2, "share that a word which came before gives to what followed it then"],
  ["zero_ablation", "Ablation", 2, "relative change of the output without the head, where weights may be negative and have no such shares"],
];
const ROLES = { // metric -> what a head does that gives so much of its weight to it
  self_share: (share) => `Here a word gives itself ${share} of its weight.`,
  previous_token_score: (share) => `Here a word gives the word before ${share} of its weight.`,
  first_key_mass: (share) => `Here a word gives the first word ${share} of its weight.`,
  duplicate_token_score: (share) => `Here a word that came before gives ${share} of its weight to where it came: a duplicate-token head.`,
  induction_score: (share) => `Here a word that came before gives ${share} of its weight to what followed it then: an induction head.`,
};
const LEAST_SHARE = 0.5; // of a head's weight, for a role
export const LINKS = 30; // requested, so that some are between words after those with [CLS] and [SEP]

export class HeadStatistics {
  /** Calls `enlarge(head)` on clicks on a head. */
  constructor(section, enlarge) {
    Object.assign(this, { section, enlarge, table: section.querySelector("table"), rows: [], shares: [], shown: "mean" });
    markCut(section.querySelector(".wide"));
    section.querySelector("dl").append(...COLUMNS.flatMap(([, title, , about]) => [cell("dt", title), cell("dd", about)]));
  }

  /** Fills the table with `metrics`, [h] each, or [b, h] with a batch, of which `item` is shown. */
  show(metrics, item, batched) {
    const ofItem = (numbers) => (batched ? numbers?.[item] : numbers);
    const numbers = (name) => ofItem(metrics[name]?.relative_change ?? metrics[name]);
    const known = COLUMNS.filter(([name]) => numbers(name)?.some((number) => number !== null)); // no word need come twice
    this.shares = Object.keys(ROLES).map((name) => [name, numbers(name) ?? []]); // of each head, for its role
    const links = metrics.strongest_links ?? {};
    const [from, to, weights] = [links.query_words ?? links.queries, links.key_words ?? links.keys, links.weights].map(ofItem);
    const titles = ["Head", ...known.map(([, title]) => title), ...(weights ? ["Strongest link"] : [])];
    const columns = known.map(([name, , digits]) => bars(numbers(name), (number) => number.toFixed(digits)));
    if (weights) columns.push(weights.map((_, h) => make("td", { className: "link", textContent: strongest(from[h], to[h], weights[h]) })));
    const head = row(titles.map((title) => cell("th", title, "col")));
    this.rows = (columns[0] ?? []).map((_, h) => row([this.name(h), ...columns.map((column) => column[h])]));
    this.table.replaceChildren(make("thead", {}, head), make("tbody", {}, ...this.rows));
    this.reveal();
    this.mark(this.shown);
  }

  /** What a head does with most of its weight, a sentence; "" for the mean of heads, and where there are no statistics. */
  role(head) {
    const known = this.shares.map(([name, shares]) => [name, shares[head] ?? null]).filter(([, share]) => share !== null);
    if (!known.length) return "";
    const [name, share] = known.reduce((a, b) => (b[1] > a[1] ? b : a));
    return share < LEAST_SHARE ? "Here it does several things." : ROLES[name](share.toFixed(2));
  }

  /** Empties the table and shows a reason instead. */
  clear() {
    this.shares = [];
    this.table.replaceChildren();
    this.reveal();
  }

  /** Marks the table as that of an earlier request, until `show` or `clear`. */
  wait() {
    this.shares = [];
    this.section.inert = true;
  }

  reveal() {
    this.section.hidden = this.section.inert = false;
  }

  mark(shown) {
    this.shown = shown;
    this.rows.forEach((line, head) => line.classList.toggle("shown", head === shown));
  }

  name(h) {
    const button = make("button", { type: "button", textContent: h, ariaLabel: `Head ${h}`, onclick: () => this.enlarge(h) });
    return make("th", { scope: "row" }, button);
  }
}

/** A head's first link as text, between real words if there is one. */
function strongest(from, to, weights) {
  const known = weights.flatMap((weight, i) => (weight === null ? [] : [i]));
  const i = known.find((i) => !isSpecial(from[i]) && !isSpecial(to[i])) ?? known[0];
  return i === undefined ? "–" : `${from[i]} → ${to[i]} ${weights[i].toFixed(2)}`;
}

const row = (cells) => make("tr", {}, ...cells);

const cell = (tag, textContent, scope) => make(tag, { textContent, ...(scope && { scope }) });

export class OutputChange {
  constructor(section) {
    Object.assign(this, { section, table: section.querySelector("table"), summary: section.querySelector(".hint") });
    markCut(section.querySelector(".tall"));
  }

  /** Compares the outputs of a batch item with and without the heads `off`, of `count`. `queries`: [index, word] of each row that is shown. */
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

/** ‖a − b‖ / ‖a‖ of rows of `width` numbers; null where a is zero. */
function relativeChange(a, b, width) {
  return Array.from({ length: a.length / width }, (_, i) => {
    let [difference, size] = [0, 0];
    for (let j = i * width; j < (i + 1) * width; j++) {
      difference += (a[j] - b[j]) ** 2;
      size += a[j] ** 2;
    }
    return size ? Math.sqrt(difference / size) : null;
  });
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;

/** A table cell for each number or null, with a bar of its size relative to the largest. `text` writes a number. */
function bars(numbers, text) {
  const most = Math.max(...numbers.map(Math.abs)) || 1; // null counts as 0
  return numbers.map((number) => {
    const cell = make("td", { textContent: number === null ? "–" : text(number) });
    cell.style.setProperty("--share", `${(100 * Math.abs(number)) / most}%`);
    return cell;
  });
}
