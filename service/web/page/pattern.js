// The attention weights of one batch item: matrices of heads, the mean of some heads, the strongest links.

/** A function from the index of a weight to its factor, which makes colours of weights: 1 / largest for the `scale` "head", 1 / largest of the
 * row for "row", 1 for "one". */
export function colourFactors(weights, scale) {
  if (scale === "one") return () => 1;
  if (scale === "head") {
    const factor = 1 / (largest(weights.data, 0, weights.data.length) || 1);
    return () => factor;
  }
  const factors = Array.from({ length: weights.queries }, (_, q) => 1 / (largest(weights.data, q * weights.keys, (q + 1) * weights.keys) || 1));
  return (i) => factors[Math.floor(i / weights.keys)];
}

/** The largest of numbers[from..to). */
export function largest(numbers, from, to) {
  let most = 0;
  for (let i = from; i < to; i++) if (numbers[i] > most) most = numbers[i];
  return most;
}

/** Weights [queries, keys] of one head, or the mean of several. Rows are queries. */
export class Weights {
  constructor(data, queries, keys) {
    Object.assign(this, { data, queries, keys });
  }

  at(q, k) {
    return this.data[q * this.keys + k];
  }

  /** A row (the weights of a query) or a column (the weights on a key). */
  along(axis, index) {
    if (axis === "query") return this.data.subarray(index * this.keys, (index + 1) * this.keys);
    return Float32Array.from({ length: this.queries }, (_, q) => this.at(q, index));
  }

  /** At most `count` links [q, k, weight], the strongest first. */
  links(count) {
    const order = [];
    const least = Float32Array.from(this.data).sort().at(-count) ?? 0;
    for (let i = 0; i < this.data.length; i++) if (this.data[i] > 0 && this.data[i] >= least) order.push(i);
    order.sort((a, b) => this.data[b] - this.data[a] || a - b);
    return order.slice(0, count).map((i) => [Math.floor(i / this.keys), i % this.keys, this.data[i]]);
  }

  /** The weights of these rows and columns. */
  part(rows, columns) {
    if (rows.length === this.queries && columns.length === this.keys) return this;
    const data = Float32Array.from(rows.flatMap((q) => columns.map((k) => this.at(q, k))));
    return new Weights(data, rows.length, columns.length);
  }

  /** The largest weight of each block, with at most `size` blocks per side, for thumbnails. */
  pooled(size) {
    const step = Math.ceil(Math.max(this.queries, this.keys) / size);
    if (step === 1) return this;
    const [rows, columns] = [Math.ceil(this.queries / step), Math.ceil(this.keys / step)];
    const pooled = new Float32Array(rows * columns);
    for (let q = 0, i = 0; q < this.queries; q++) {
      const row = Math.floor(q / step) * columns;
      for (let k = 0; k < this.keys; k++, i++) {
        const at = row + Math.floor(k / step);
        if (this.data[i] > pooled[at]) pooled[at] = this.data[i];
      }
    }
    return new Weights(pooled, rows, columns);
  }
}

/** The weights of all heads for one batch item; of each head those of `rows` and `columns`, lists of indices. */
export class Pattern {
  constructor(data, [, count, queries, keys], item, rows, columns) {
    const size = queries * keys;
    Object.assign(this, { queries: rows.length, keys: columns.length });
    this.heads = Array.from({ length: count }, (_, h) => {
      const from = (item * count + h) * size;
      return new Weights(data.subarray(from, from + size), queries, keys).part(rows, columns);
    });
  }

  /** The mean of these heads; zeros for none. */
  mean(chosen) {
    const sum = new Float32Array(this.queries * this.keys);
    for (const h of chosen) {
      const { data } = this.heads[h];
      for (let i = 0; i < sum.length; i++) sum[i] += data[i];
    }
    if (chosen.length) for (let i = 0; i < sum.length; i++) sum[i] /= chosen.length;
    return new Weights(sum, this.queries, this.keys);
  }
}
