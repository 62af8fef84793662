// How one attention weight is computed, and what it adds to the output: the steps of the layer with their formulas, as GET /layers/{name} has
// them, and beside them the numbers of the service.

import { Cell, row } from "./cell.js";
import { make } from "./dom.js";
import { number } from "./equations.js";
import { attempt } from "./form.js";
import { withoutHeads } from "./request.js";
import { cachedTensors, get } from "./wire.js";

const OUTPUTS = ["query_projection", "key_projection", "value_projection", "attention_weights", "head_outputs"];
const PRODUCTS = ["scaled_products", "add_terms"]; // steps before a soft cap
const withouts = new WeakMap(); // request -> the same without a head, by its number

export class Steps {
  /** Calls `enlarge(head)` on clicks on a head. */
  constructor(section, enlarge) {
    Object.assign(this, { section, enlarge, title: section.querySelector("h2"), list: section.querySelector("ol") });
  }

  /**
   * Shows the steps of a cell of a reply to a request, or nothing for null. A cell is {item, head, q, k, weights, on, labels}: head may be
   * "mean", weights are those of all heads, `on` the heads in the mean, labels the words of both axes.
   */
  async show(request, reply, cell) {
    this.cell = cell;
    this.section.hidden = !cell;
    this.list.replaceChildren();
    if (!cell) return;
    this.title.textContent = `Step by step: ${cell.labels.query[cell.q]} → ${cell.labels.key[cell.k]}`;
    const isShown = () => this.cell === cell;
    const fill = async () => {
      const list = cell.head === "mean" ? [this.mean(cell)] : await steps(request, reply, cell);
      if (isShown()) this.list.replaceChildren(...list);
    };
    await attempt("steps", fill, isShown);
  }

  mean({ weights, on }) {
    const mean = on.reduce((sum, head) => sum + weights[head], 0) / (on.length || 1);
    const button = (head) => make("button", { type: "button", className: "small", onclick: () => this.enlarge(head) }, `Head ${head}: ${number(weights[head])}`);
    const text = `Mean of ${on.length} heads = ${number(mean)}. Choose a head for its steps.`;
    return step("mean", "", text, make("div", { className: "tools wrap" }, ...on.map(button)));
  }
}

/** The inputs, then the steps of the layer in order, each with its formula and the numbers that are known of it, and what the request adds. */
async function steps(request, { layer, spec }, cell) {
  const program = withSoftcap(Object.entries((await get(`layers/${encodeURIComponent(layer.name)}`)).steps), request);
  const written = program.map(([, formula]) => writtenBy(formula));
  const outputs = [...OUTPUTS, ...(written.includes("S") ? ["scores", ...(written.includes("L") ? ["log_sum_exp"] : [])] : [])];
  const [tensors, rows] = await Promise.all([cachedTensors(request, outputs), spec.projections ? rowsOfOutput(request, spec, cell) : null]);
  const numbers = new Cell(request, spec, cell, tensors, rows, program.map(([name]) => name));
  const list = [step("inputs", "", ...numbers.inputs())];
  for (const [i, [name, formula]] of program.entries()) {
    const value = written[i];
    const later = program.slice(i + 1).flatMap(([other], j) => (written[i + 1 + j] === value ? [other] : []));
    list.push(step(name, formula, ...numbers.of(name, value, later)));
    const added = later.length ? [] : numbers.ofRequest(value);
    if (added.length) list.push(step("request", "", ...added));
  }
  return list;
}

/** The value that a formula writes: Q, K, V, S, L, A, O, C or Y, as the service names them; "" for any other. */
const writtenBy = (formula) => /^[QKVSLAOCY](?=[ _,])/.exec(formula)?.[0] ?? "";

/** The steps, with a soft cap of the request where the layer has none. */
function withSoftcap(program, { softcap }) {
  if (!softcap || program.some(([name]) => name === "softcap")) return program;
  const at = program.findLastIndex(([name]) => PRODUCTS.includes(name));
  return program.toSpliced(at + 1, 0, ["softcap", "S, with the soft cap of the request"]);
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

/** A step with its formula; `numbers` are texts and tables. */
function step(title, formula, ...numbers) {
  const texts = numbers.map((one) => (typeof one === "string" ? make("span", { textContent: one }) : one));
  return make("li", {}, make("strong", { textContent: title }), ...(formula ? [make("code", { textContent: formula })] : []), ...texts);
}
