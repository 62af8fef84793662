// The numbers of one cell, step by step: lists of a text, if there is one, and tables.

import { columns, equation, number, products, shown, table } from "./equations.js";
import { rowOfRequest } from "./tensors.js";

const CLOSE = 1e-4; // relative difference of what is computed here from float32 numbers, and by the service
const REQUESTED = { S: ["bias"], A: ["dropout", "pattern", "fully_masked"], O: ["head_scale", "head_outputs"] }; // fields that add steps

// Step -> its numbers from a Cell. Of steps that are not here formulas are shown, and their results after the last that writes a value.
const STEPS = {
  scaled_products(cell) {
    const { query, key } = cell;
    const scale = cell.request.scale ?? cell.spec.scale;
    const dot = query.reduce((sum, number, i) => sum + number * key[i], 0);
    cell.score = dot * scale;
    const text = equation([scale, dot], cell.score, (a, b) => a * b, (a, b) => `${a} · ${b}`);
    return [text, table(`All ${query.length} products, whose sum is ${number(dot)}`, ["n", "Q_i", "K_j", "product"], products(query, key, dot))];
  },

  softcap(cell) {
    if (cell.score === null) return [];
    const inputs = [cell.request.softcap ?? cell.spec.softcap, cell.score];
    const compute = (a, b) => a * Math.tanh(b / a);
    cell.score = compute(...inputs);
    return [equation(inputs, cell.score, compute, (a, b) => `${a} · tanh(${b} / ${a})`)];
  },

  add_bias(cell, later) {
    const { score, given: { score: after } } = cell;
    const isKnown = score !== null && !cell.isMasked && later.every((name) => name === "mask");
    cell.score = isKnown ? after : null;
    return isKnown ? [equation([score, after - score], after, (a, b) => a + b, (a, b) => `${a} + ${b}`) + cell.with("S")] : [];
  },

  mask(cell) {
    return !cell.scores ? [] : [cell.isMasked ? "−∞, since the layer or the request keeps i from j" : "j is visible to i"];
  },

  softmax(cell) {
    const { scores, total, k } = cell;
    if (!scores) return [];
    const shares = total === -Infinity ? scores.map(() => 0) : scores.map((score) => Math.exp(score - total));
    cell.weight = shares[k];
    const written = () => equation([scores[k], total], shares[k], (a, b) => Math.exp(a - b), (a, b) => `exp(${a} − ${b})`);
    const text = total === -Infinity ? "No key is visible to i: 0" : `exp(S_ij − L_i) = ${written()}`;
    return [text, table(`All keys of “${cell.i}”`, ["Key", "S_ij", "A_ij"], Array.from(scores, (score, j) => [cell.labels[j], score, shares[j]]), k)];
  },

  sum_exponentials(cell) {
    return cell.scores ? [number(cell.total)] : [];
  },

  sinks(cell) {
    if (cell.weight === null) return [];
    const [before, share] = [cell.weight, cell.total === -Infinity ? 0 : Math.exp(cell.total - cell.given.total)];
    cell.weight *= share;
    return [equation([before, share], cell.weight, (a, b) => a * b, (a, b) => `${a} · ${b}`)];
  },

  sum_with_sinks(cell) {
    return cell.scores ? [number(cell.given.total)] : [];
  },

  weighted_values(cell) {
    const { weights, values, k } = cell;
    const weighted = Array.from(values[k], (value) => value * weights[k]);
    cell.sum = weighted.map((_, n) => values.reduce((sum, value, j) => sum + weights[j] * value[n], 0));
    const factors = (n) => shown([weights[k], values[k][n]], weighted[n], (a, b) => a * b);
    const rows = weighted.map((product, n) => [n, ...factors(n), number(product), number(cell.sum[n])]);
    const text = `A_ij V_j has length ${number(length(weighted))}, the sum over all keys ${number(length(cell.sum))}`;
    return [text, table(`All ${rows.length} products, and their sums over all keys`, ["n", "A_ij", "V_j", "product", "sum"], rows)];
  },

  output(cell) {
    if (!cell.rows) return [];
    const { row: whole, part } = cell.rows;
    const text = `Y_i has length ${number(length(whole))}, and without this head it differs by a row of length ${number(length(part))}`;
    return [text, columns(`All ${whole.length} numbers`, ["This head", "Y_i"], [part, whole])];
  },
};

// Value -> its numbers after the last step that writes it, where they are not known yet.
const VALUES = {
  Q: (cell) => [columns("All numbers of Q_i", ["Q_i"], [cell.query])],
  K: (cell) => [columns("All numbers of K_j", ["K_j"], [cell.key])],
  V: (cell) => [columns("All numbers of V_j", ["V_j"], [cell.values[cell.k]])],

  S(cell) {
    if (cell.score !== null || cell.isMasked) return [];
    cell.score = cell.given.score;
    return [`S_ij = ${number(cell.score)}${cell.with("S")}`];
  },

  A(cell) {
    if (cell.weight !== null) return [];
    cell.weight = cell.given.weight;
    return [`A_ij = ${number(cell.weight)}${cell.with("A")}`];
  },

  O(cell) {
    if (cell.with("O") || isClose(cell.heads, cell.sum)) return [];
    return [`O_i has length ${number(length(cell.heads))}`, columns("All numbers of A V and of O_i", ["A V", "O_i"], [cell.sum, cell.heads])];
  },
};

// Value -> what fields of the request do with it after the last step of the layer.
const REQUESTS = {
  S(cell) {
    if (!cell.scores) return [];
    if (cell.isMasked) return cell.has("mask") ? [] : ["S_ij = −∞: a mask of the request keeps i from j"];
    const { score, given: { score: after } } = cell;
    const sum = () => `S_ij = ${equation([score, after - score], after, (a, b) => a + b, (a, b) => `${a} + ${b}`)}${cell.with("S")}`;
    const hidden = cell.has("mask") ? 0 : cell.scores.filter((one) => one === -Infinity).length;
    const isAdded = cell.with("S") && Math.abs(after - score) > CLOSE * (1 + Math.abs(score));
    return [...(isAdded ? [sum()] : []), ...(hidden ? [`Masks keep i from ${hidden} of ${cell.scores.length} keys, not from j`] : [])];
  },

  A(cell) {
    const { weight, given: { weight: after }, request: { dropout } } = cell;
    if (!cell.with("A") || Math.abs(after - weight) <= CLOSE * Math.abs(after)) return [];
    const kept = () => equation([weight, dropout.p], after, (a, b) => a / (1 - b), (a, b) => `${a} / (1 − ${b})`);
    return [`A_ij = ${dropout && after && !cell.request.pattern ? kept() : number(after)}${cell.with("A")}`];
  },

  O(cell) {
    if (!cell.with("O")) return [];
    return [`O_i has length ${number(length(cell.heads))}${cell.with("O")}`, columns("All numbers of A V and of O_i", ["A V", "O_i"], [cell.sum, cell.heads])];
  },
};

export class Cell {
  /** `tensors` are outputs of `request`, `rows` those of the output for the query, or null, and `names` the steps of the layer. */
  constructor(request, spec, { item, head, q, k, labels }, tensors, rows, names) {
    const keys = Math.floor((head * spec.num_kv_heads) / spec.num_heads); // the head of keys and values
    Object.assign(this, { request, spec, item, q, k, rows, names, i: labels.query[q], j: labels.key[k], labels: labels.key });
    this.query = row(tensors.query_projection, item, head, q);
    this.key = row(tensors.key_projection, item, keys, k);
    this.weights = row(tensors.attention_weights, item, head, q);
    this.values = Array.from(this.weights, (_, j) => row(tensors.value_projection, item, keys, j));
    this.heads = row(tensors.head_outputs, item, head, q);
    this.scores = tensors.scores && !names.includes("two_scores") ? row(tensors.scores, item, head, q) : null; // one row, not one of each softmax
    this.isMasked = this.scores?.[k] === -Infinity;
    this.total = this.scores && logSumExp(this.scores);
    this.given = { score: this.scores?.[k], weight: this.weights[k], total: tensors.log_sum_exp && row(tensors.log_sum_exp, item, head)[q] };
    [this.score, this.weight] = [null, null]; // after the steps so far; null: unknown
  }

  has(name) {
    return this.names.includes(name);
  }

  /** The numbers of a step that writes this value, and after the last such step those of the value; `later` are further such steps. */
  of(name, value, later) {
    const isKnown = Object.hasOwn(STEPS, name);
    if (!isKnown && value === "S") this.score = null;
    if (!isKnown && value === "A") this.weight = null;
    const numbers = isKnown ? STEPS[name](this, later) : [];
    return later.length ? numbers : [...numbers, ...(VALUES[value]?.(this) ?? [])];
  }

  inputs() {
    const { request, item, q, k, i, j } = this;
    const inputs = [rowOfRequest(request.query, item, q), rowOfRequest(request.key ?? request.query, item, k)];
    const titles = [`“${i}”`, `“${j}”`];
    if (request.value) {
      inputs.push(rowOfRequest(request.value, item, k));
      titles.push(`“${j}”, for the value`);
    }
    const widths = [...new Set(inputs.map((numbers) => numbers?.length ?? 0))].join(", ");
    return [`x is the row of i = “${i}”, z that of j = “${j}”, of ${widths} numbers`, columns("All numbers of the rows", titles, inputs)];
  }

  /** ", with FIELDS of the request" that change this value after the layer's steps; "" if there are none. */
  with(value) {
    const fields = REQUESTED[value].filter((field) => (this.request[field] ?? null) !== null);
    return fields.length ? `, with ${fields.join(" and ")} of the request` : "";
  }

  /** What the request does with a value after the last step of the layer that writes it. */
  ofRequest(value) {
    return REQUESTS[value]?.(this) ?? [];
  }
}

/** The numbers of a tensor's last axis; a tensor without a batch axis has no `item`. */
export function row({ shape, data }, item, ...indices) {
  const all = shape.length === indices.length + 2 ? [item, ...indices] : indices;
  const start = all.reduce((sum, index, axis) => sum * shape[axis] + index, 0);
  return data.subarray(start * shape.at(-1), (start + 1) * shape.at(-1));
}

/** ln Σ exp(number), without overflow. */
function logSumExp(numbers) {
  const most = Math.max(...numbers);
  return most === -Infinity ? most : most + Math.log(numbers.reduce((sum, number) => sum + Math.exp(number - most), 0));
}

const length = (numbers) => Math.sqrt(numbers.reduce((sum, number) => sum + number ** 2, 0));

const isClose = (one, other) => length(one.map((number, n) => number - other[n])) <= CLOSE * (1 + length(other));
