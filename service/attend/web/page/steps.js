// How one attention weight is computed: query · key, scale, what is added, mask and softmax, with the numbers of the service.

import { make, markCut } from "./dom.js";
import { attempt } from "./form.js";
import { cachedTensors } from "./wire.js";

const OUTPUTS = ["query_projection", "key_projection", "scores", "log_sum_exp"];

/** The numbers of a tensor's last axis; a tensor without a batch axis has no `item`. */
function row({ shape, data }, item, ...indices) {
  const all = shape.length === indices.length + 2 ? [item, ...indices] : indices;
  const start = all.reduce((sum, index, axis) => sum * shape[axis] + index, 0);
  return data.subarray(start * shape.at(-1), (start + 1) * shape.at(-1));
}

export class Steps {
  /** Calls `enlarge(head)` on clicks on a head. */
  constructor(section, enlarge) {
    Object.assign(this, { section, enlarge, title: section.querySelector("h2"), list: section.querySelector("ol") });
  }

  /**
   * Shows the steps of a cell, or nothing for null. A cell is {item, head, q, k, weights, on, labels}: head may be "mean", weights are those of
   * all heads, `on` the heads in the mean, labels the words of both axes.
   */
  async show(request, spec, cell) {
    this.cell = cell;
    this.section.hidden = !cell;
    this.list.replaceChildren();
    if (!cell) return;
    this.title.textContent = `Step by step: ${cell.labels.query[cell.q]} → ${cell.labels.key[cell.k]}`;
    const isShown = () => this.cell === cell;
    const fill = async () => {
      const list = cell.head === "mean" ? [this.mean(cell)] : steps(await cachedTensors(request, OUTPUTS), request, spec, cell);
      if (isShown()) this.list.replaceChildren(...list);
    };
    await attempt("steps", fill, isShown);
  }

  mean({ weights, on }) {
    const mean = on.reduce((sum, head) => sum + weights[head], 0) / (on.length || 1);
    const button = (head) => make("button", { type: "button", className: "small", onclick: () => this.enlarge(head) }, `Head ${head}: ${number(weights[head])}`);
    const text = `Mean of ${on.length} heads = ${number(mean)}. Choose a head for its steps.`;
    return step("Mean", text, make("div", { className: "tools wrap" }, ...on.map(button)));
  }
}

/**
 * The steps of the weight of {item, head, q, k}: `tensors` are OUTPUTS of `request`, `spec` is the layer's. Without scale or softcap in the
 * request, the layer's hold.
 */
function steps(tensors, request, spec, { item, head, q, k, weights, labels }) {
  const query = row(tensors.query_projection, item, head, q);
  const key = row(tensors.key_projection, item, Math.floor((head * spec.num_kv_heads) / spec.num_heads), k);
  const [scale, softcap] = [request.scale ?? spec.scale, request.softcap ?? spec.softcap];
  const dot = query.reduce((sum, number, i) => sum + number * key[i], 0);
  const scaled = dot * scale;
  const capped = softcap ? softcap * Math.tanh(scaled / softcap) : scaled;
  const scores = row(tensors.scores, item, head, q);
  const score = scores[k];
  const total = row(tensors.log_sum_exp, item, head)[q]; // ln Σ exp(scores), with the layer's sink
  const shares = scores.map((other) => Math.exp(other - total));
  const products = Array.from(query, (number, i) => [i, number, key[i], number * key[i]]);
  const added = score - capped;
  const isMasked = score === -Infinity;
  const list = [step("Query · key", `q · k = ${number(dot)}`, table(`All ${query.length} products`, ["i", "q", "k", "q × k"], products))];
  list.push(step("Scale", `${number(dot)} × ${number(scale)} = ${number(scaled)}`));
  if (softcap) list.push(step("Soft cap", `${number(softcap)} × tanh(${number(scaled)} / ${number(softcap)}) = ${number(capped)}`));
  if (!isMasked && Math.abs(added) > 1e-4 * (1 + Math.abs(capped))) {
    list.push(step("Bias", `${number(capped)} + ${number(added)} = ${number(score)}, by bias or positions`));
  }
  list.push(step("Mask", isMasked ? "A mask keeps this query from this key: the score is −∞" : `No mask keeps this query from this key: ${number(score)}`));
  const all = Array.from(scores, (other, i) => [labels.key[i], other, total === -Infinity ? weights[head] : shares[i]]);
  const rest = table(`All keys of “${labels.query[q]}”`, ["Key", "Score", "Weight"], all, k);
  if (total === -Infinity) return [...list, step("Softmax", `No key is left for this query: its weight is ${number(weights[head])} by the field fully_masked`, rest)];
  const text = `exp(${number(score)}) / Σ exp(scores) = exp(${number(score)} − ${number(total)}) = ${number(shares[k])}`;
  list.push(step("Softmax", text, rest));
  if (request.dropout) list.push(step("Dropout", weights[head] ? `${number(shares[k])} / (1 − ${request.dropout.p}) = ${number(weights[head])}` : "Dropped: 0"));
  return list;
}

const step = (title, text, ...more) => make("li", {}, make("strong", { textContent: title }), make("span", { textContent: text }), ...more);

/** A table that can be opened; row `marked` is set off. */
function table(title, columns, rows, marked) {
  const line = (tag, cells) => make("tr", {}, ...cells.map((cell) => make(tag, { textContent: typeof cell === "number" ? number(cell) : cell })));
  const body = rows.map((cells, i) => Object.assign(line("td", cells), { className: i === marked ? "marked" : "" }));
  const scroller = make("div", { className: "wide tall", tabIndex: 0, role: "group", ariaLabel: title });
  scroller.append(make("table", {}, make("thead", {}, line("th", columns)), make("tbody", {}, ...body)));
  markCut(scroller);
  return make("details", {}, make("summary", { textContent: title }), scroller);
}

/** Four significant digits, with a real minus sign. */
function number(value) {
  if (Math.abs(value) === Infinity) return value < 0 ? "−∞" : "∞";
  return String(Number(value.toPrecision(4))).replace("-", "−");
}
