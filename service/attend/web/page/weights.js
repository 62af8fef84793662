// The attention weights of one batch item: a matrix for each head, their mean, the strongest links.

const FEWEST = 1e-5; // as a share of the largest weight: the end of a logarithmic scale, as in pictures of the service
const FAINTEST = 1 / 512; // the strength of smaller weights, which are not exactly 0

/** Weights [queries, keys] of one head, or the mean of several. Rows are queries. `peak` is the largest weight of all heads. */
export class Weights {
  constructor(data, queries, keys, peak = 1) {
    Object.assign(this, { data, queries, keys, peak });
  }

  at(q, k) {
    return this.data[q * this.keys + k];
  }

  /** A row (the weights of a query) or a column (the weights on a key). */
  along(axis, index) {
    if (axis === "query") return this.data.subarray(index * this.keys, (index + 1) * this.keys);
    return Float32Array.from({ length: this.queries }, (_, q) => this.at(q, index));
  }

  /**
   * A function from the index of a weight to its strength, 0..1, which colours show. The `scale` is "head" (the weight divided by the largest),
   * "all" (by that of all heads), "row" (by that of its row), "one" (by 1) or "log" (its place between the ends of the logarithmic scale).
   */
  strengths(scale) {
    const { data } = this;
    if (scale === "row") {
      const factors = Array.from({ length: this.queries }, (_, q) => 1 / (this.largest(q * this.keys, (q + 1) * this.keys) || 1));
      return (i) => data[i] * factors[Math.floor(i / this.keys)];
    }
    if (scale === "log") {
      const [least, most] = this.ends();
      const factor = 1 / Math.log(most / least);
      return (i) => (data[i] > 0 ? Math.max(FAINTEST, Math.log(data[i] / least) * factor) : data[i]);
    }
    const factor = 1 / ({ one: 1, all: this.peak }[scale] ?? (this.largest() || 1));
    return (i) => data[i] * factor;
  }

  /** The ends of the logarithmic scale: the smallest weight above 0, within limits, and the largest. */
  ends() {
    const most = this.largest() || 1;
    const least = this.data.reduce((all, weight) => (weight > 0 && weight < all ? weight : all), most);
    return [Math.min(Math.max(least, most * FEWEST), most / 10), most];
  }

  /** Standard deviation over rows of their entropy, as a share of the largest that so many keys allow. */
  entropyContrast() {
    const entropies = Array.from({ length: this.queries }, (_, q) => {
      const row = this.along("query", q);
      const [sum, keys] = [row.reduce((a, b) => a + b, 0), row.filter((weight) => weight > 0).length];
      if (keys < 2 || !sum) return null;
      return -row.reduce((all, weight) => all + (weight > 0 ? (weight / sum) * Math.log(weight / sum) : 0), 0) / Math.log(keys);
    }).filter((entropy) => entropy !== null);
    const mean = entropies.reduce((a, b) => a + b, 0) / (entropies.length || 1);
    return Math.sqrt(entropies.reduce((all, entropy) => all + (entropy - mean) ** 2, 0) / (entropies.length || 1));
  }

  /** The largest of data[from..to). */
  largest(from = 0, to = this.data.length) {
    let most = 0;
    for (let i = from; i < to; i++) if (this.data[i] > most) most = this.data[i];
    return most;
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
    return new Weights(data, rows.length, columns.length, this.peak);
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
    return new Weights(pooled, rows, columns, this.peak);
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
    this.peak = this.heads.reduce((most, head) => Math.max(most, head.largest()), 0) || 1;
    for (const head of this.heads) head.peak = this.peak;
  }

  /** The mean of these heads; zeros for none. */
  mean(chosen) {
    const sum = new Float32Array(this.queries * this.keys);
    for (const h of chosen) {
      const { data } = this.heads[h];
      for (let i = 0; i < sum.length; i++) sum[i] += data[i];
    }
    if (chosen.length) for (let i = 0; i < sum.length; i++) sum[i] /= chosen.length;
    return new Weights(sum, this.queries, this.keys, this.peak);
  }
}
