// How one attention weight is computed, and what it adds to the output: rows of the inputs, projections, query · key, scale, what is added, mask,
// softmax, weighted values and the row of the output, with the numbers of the service.

import { make, markCut } from "./dom.js";
import { attempt } from "./form.js";
import { withoutHeads } from "./request.js";
import { rowOfRequest } from "./tensors.js";
import { cachedTensors } from "./wire.js";

const OUTPUTS = ["query_projection", "key_projection", "value_projection", "scores", "log_sum_exp", "attention_weights", "head_outputs"];
const DIGITS = 4; // significant ones, and more where a result would not follow from the numbers as they are shown
const ALL_DIGITS = 17;
const CLOSE = 1e-4; // relative difference of what is computed here from float32 numbers, and by the service
const withouts = new WeakMap(); // request -> the same without a head, by its number

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
      const list = cell.head === "mean" ? [this.mean(cell)] : await steps(request, spec, cell);
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

/** The steps of a weight, then those from it to the output. */
async function steps(request, spec, cell) {
  const [tensors, outputs] = await Promise.all([cachedTensors(request, OUTPUTS), spec.projections ? rowsOfOutput(request, spec, cell) : null]);
  return [...stepsToHead(tensors, request, spec, cell), ...stepsToWeight(tensors, request, spec, cell), ...stepsToOutput(tensors, outputs, spec, cell)];
}

/** {row, part}: the row of the output for a query, and what a head adds to it. */
async function rowsOfOutput(request, spec, { item, head, q }) {
  const requests = [request, withoutHead(request, spec.num_heads, head)];
  const [all, others] = (await Promise.all(requests.map((body) => cachedTensors(body, ["output"])))).map(({ output }) => row(output, item, q));
  return { row: all, part: all.map((number, i) => number - others[i]) };
}

/** A request without a head; the same object each time, since replies are cached by it. */
function withoutHead(request, count, head) {
  if (!withouts.has(request)) withouts.set(request, {});
  return (withouts.get(request)[head] ??= withoutHeads(request, [head], count));
}

/** The steps from the rows of the inputs to the query, the key and the value of a head. */
function stepsToHead(tensors, request, spec, { item, head, q, k, labels }) {
  const [query, key] = [labels.query[q], labels.key[k]];
  const keys = request.key ?? request.query;
  const inputs = [rowOfRequest(request.query, item, q), rowOfRequest(keys, item, k), ...(request.value ? [rowOfRequest(request.value, item, k)] : [])];
  const titles = [`“${query}”`, `“${key}”`, ...(request.value ? [`“${key}”, for the value`] : [])];
  const lengths = inputs.map((numbers) => numbers?.length ?? 0);
  const widths = new Set(lengths).size === 1 ? `each a row of ${lengths[0]} numbers` : `rows of ${lengths.join(", ")} numbers`;
  const list = [step("Inputs", `${titles.join(" and ")}, ${widths}`, columns("All numbers of the rows", titles, inputs))];
  const projected = [
    row(tensors.query_projection, item, head, q),
    row(tensors.key_projection, item, keyHead(spec, head), k),
    row(tensors.value_projection, item, keyHead(spec, head), k),
  ];
  const more = [spec.qk_norm && "a norm", spec.rope && "a rotation by the position (RoPE)", spec.query_scale && "a factor of the position"].filter(Boolean);
  const after = more.length ? `; then q and k get ${more.join(" and ")}` : "";
  const text = spec.projections
    ? `Head ${head} multiplies the rows by its matrices: q = W_Q × the row of “${query}”; k = W_K × and v = W_V × that of “${key}”${spec.bias ? ", plus biases" : ""}${after}`
    : `The layer has no projections: head ${head} takes its part of each row${after}`;
  return [...list, step("Projections", text, columns("All numbers of q, k and v", ["q", "k", "v"], projected))];
}

/** A table with a column for each list of numbers, which may differ in length. */
function columns(title, titles, lists) {
  const known = lists.filter(Boolean); // a request may have rows of integers
  const count = Math.max(0, ...known.map((numbers) => numbers.length));
  const rows = Array.from({ length: count }, (_, i) => [i, ...lists.map((numbers) => numbers?.[i] ?? "")]);
  return table(title, ["i", ...titles], rows);
}

/**
 * The steps of the weight of {item, head, q, k}: `tensors` are OUTPUTS of `request`, `spec` is the layer's. Without scale or softcap in the
 * request, the layer's hold.
 */
function stepsToWeight(tensors, request, spec, { item, head, q, k, weights, labels }) {
  const query = row(tensors.query_projection, item, head, q);
  const key = row(tensors.key_projection, item, keyHead(spec, head), k);
  const [scale, softcap] = [request.scale ?? spec.scale, request.softcap ?? spec.softcap];
  const dot = query.reduce((sum, number, i) => sum + number * key[i], 0);
  const scaled = dot * scale;
  const capped = softcap ? softcap * Math.tanh(scaled / softcap) : scaled;
  const scores = row(tensors.scores, item, head, q);
  const score = scores[k];
  const total = row(tensors.log_sum_exp, item, head)[q]; // ln Σ exp(scores), with the layer's sink
  const shares = scores.map((other) => Math.exp(other - total));
  const isMasked = score === -Infinity;
  const list = [step("Query · key", `q · k = ${number(dot)}`, table(`All ${query.length} products`, ["i", "q", "k", "q × k"], products(query, key, dot)))];
  list.push(step("Scale", equation([dot, scale], scaled, (a, b) => a * b, (a, b) => `${a} × ${b}`)));
  if (softcap) list.push(step("Soft cap", equation([softcap, scaled], capped, (a, b) => a * Math.tanh(b / a), (a, b) => `${a} × tanh(${b} / ${a})`)));
  if (!isMasked && Math.abs(score - capped) > CLOSE * (1 + Math.abs(capped))) {
    const text = equation([capped, score - capped], score, (a, b) => a + b, (a, b) => `${a} + ${b}`);
    list.push(step("Bias", `${text}, by bias or positions`));
  }
  list.push(step("Mask", isMasked ? "A mask keeps this query from this key: the score is −∞" : `No mask keeps this query from this key: ${number(score)}`));
  const all = Array.from(scores, (other, i) => [labels.key[i], other, total === -Infinity ? weights[head] : shares[i]]);
  const rest = table(`All keys of “${labels.query[q]}”`, ["Key", "Score", "Weight"], all, k);
  if (total === -Infinity) return [...list, step("Softmax", `No key is left for this query: its weight is ${number(weights[head])} by the field fully_masked`, rest)];
  const sink = spec.sinks ? " and the layer’s sink" : "";
  list.push(step("Log-sum-exp", `ln Σ exp(score), over all keys${sink}, = ${number(total)}. To subtract it from a score is to divide exp(score) by the sum, and no exp overflows.`));
  const softmax = equation([score, total], shares[k], (a, b) => Math.exp(a - b), (a, b) => `exp(${a} − ${b})`);
  list.push(step("Softmax", `exp(${number(score)}) / Σ exp(score) = ${softmax}`, rest));
  if (request.dropout) {
    const kept = equation([shares[k], request.dropout.p], weights[head], (a, b) => a / (1 - b), (a, b) => `${a} / (1 − ${b})`);
    list.push(step("Dropout", weights[head] ? kept : "Dropped: 0"));
  } else if (Math.abs(weights[head] - shares[k]) > CLOSE) {
    list.push(step("Weight", `${number(weights[head])}, by what the layer does with softmax, or by the field pattern`));
  }
  return list;
}

/** The steps from a weight to the row of the output; `outputs` as of `rowsOfOutput`, null for a layer without output projection. */
function stepsToOutput(tensors, outputs, spec, { item, head, q, k, labels }) {
  const all = row(tensors.attention_weights, item, head, q);
  const weight = all[k];
  const values = Array.from(all, (_, j) => row(tensors.value_projection, item, keyHead(spec, head), j));
  const weighted = Array.from(values[k], (value) => value * weight);
  const sum = weighted.map((_, i) => values.reduce((total, value, j) => total + all[j] * value[i], 0));
  const own = row(tensors.head_outputs, item, head, q);
  const pairs = weighted.map((product, i) => [i, ...shown([weight, values[k][i]], product, (a, b) => a * b), number(product)]);
  const key = labels.key[k];
  const list = [step("Weighted value", `${number(weight)} × the value of “${key}”, ${weighted.length} numbers`, table(`All ${weighted.length} products`, ["i", "Weight", "Value", "Weight × value"], pairs))];
  const rows = weighted.map((product, i) => [i, product, sum[i]]);
  list.push(step("Sum over keys", `Σ weight × value: the length is ${number(length(sum))}, that of the part of “${key}” ${number(length(weighted))}`, table("Part and sum", ["i", `“${key}”`, "All keys"], rows)));
  if (length(own.map((number, i) => number - sum[i])) > CLOSE * (1 + length(sum))) {
    list.push(step("Head’s output", `The length is ${number(length(own))}, after what the layer or the request does with the sum: a gate, a norm, a factor or another output`, table("Sum and output", ["i", "Sum", "Output"], sum.map((number, i) => [i, number, own[i]]))));
  }
  if (!outputs) return list;
  const { row: whole, part } = outputs;
  const text = `The output projection adds up all heads: the row of “${labels.query[q]}” has length ${number(length(whole))}, and without this head it differs by a row of length ${number(length(part))}`;
  return [...list, step("Row of the output", text, table(`All ${whole.length} numbers`, ["i", "This head", "Output"], Array.from(whole, (number, i) => [i, part[i], number])))];
}

/** The number of the head of keys and values of a head. */
const keyHead = (spec, head) => Math.floor((head * spec.num_kv_heads) / spec.num_heads);

const length = (numbers) => Math.sqrt(numbers.reduce((sum, number) => sum + number ** 2, 0));

/** Rows [i, q, k, q × k], whose products, as they are shown, add up to the number that is shown of `dot`. */
function products(query, key, dot) {
  const all = Array.from(query, (number, i) => number * key[i]);
  const digits = enough((n) => number(all.reduce((sum, product) => sum + rounded(product, n), 0)) === number(dot));
  return all.map((product, i) => [i, ...shown([query[i], key[i]], product, (a, b) => a * b, digits), number(product, digits)]);
}

/** "a × b = c", by `write(...texts)` and `compute(...numbers)`. */
function equation(inputs, result, compute, write) {
  return `${write(...shown(inputs, result, compute))} = ${number(result)}`;
}

/** Numbers with so many digits that `compute` of them, as they are shown, is what is shown of the result. */
function shown(inputs, result, compute, digits = DIGITS) {
  const needed = enough((n) => number(compute(...inputs.map((input) => rounded(input, n))), digits) === number(result, digits));
  return inputs.map((input) => number(input, needed));
}

/** The fewest digits, at least DIGITS, that are `right`; else all. */
function enough(right) {
  for (let digits = DIGITS; digits < ALL_DIGITS; digits++) if (right(digits)) return digits;
  return ALL_DIGITS;
}

const rounded = (value, digits) => Number(value.toPrecision(digits));

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

/** A number of so many significant digits, with a real minus sign. */
function number(value, digits = DIGITS) {
  if (Math.abs(value) === Infinity) return value < 0 ? "−∞" : "∞";
  return String(rounded(value, digits)).replace("-", "−");
}
