// The large heat map, for the viewer in heatmap.js. One canvas of the size of the visible part is redrawn at each scroll, so that large
// matrices scroll smoothly and labels stay visible.

import { inkOn, paint } from "./colours.js";

const LABEL = 12; // pixels of a label's line
const FONT = `${LABEL}px system-ui, sans-serif`;
const STRONG = `600 ${FONT}`; // of a chosen label, which is wider
const GUTTER = 130; // pixels at most for labels
const LARGEST = 46; // pixels of a cell unless zoomed
const READABLE = 34; // pixels of a cell from which its number fits
const LEAST = 0.005; // smaller numbers would all read .00
const TALLEST = 620; // pixels of its visible part at most, unless the labels need more

export class Matrix {
  /** A cell with `isBlocked({q, k})` is crossed out. */
  constructor(element, isBlocked) {
    Object.assign(this, { element, isBlocked, zoom: 1, weights: null, isolated: {}, cursor: null });
    this.content = element.querySelector(".content");
    this.canvas = element.querySelector("canvas");
    this.bitmap = document.createElement("canvas");
    element.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => this.weights && this.layOut()).observe(element.parentElement);
  }

  /** Shows a matrix of weights with the labels of its axes. */
  show(weights, labels, scale) {
    const isOther = !this.weights || this.weights.queries !== weights.queries || this.weights.keys !== weights.keys || this.labels !== labels;
    Object.assign(this, { weights, labels });
    this.strengths = weights.strengths(scale);
    paint(this.bitmap, weights, scale);
    if (isOther) this.zoom = 1;
    this.layOut();
  }

  /** Rows and columns of its one panel. */
  sizes() {
    return this.weights ? [[this.weights.queries, this.weights.keys]] : [];
  }

  /** A weight with four significant digits; exactly 0 is "0". */
  value({ q, k }) {
    const weight = this.weights.at(q, k);
    return weight === 0 ? "0" : Math.abs(weight) < 0.001 ? weight.toExponential(2) : weight.toFixed(4);
  }

  name({ q, k }) {
    return `${this.labels.query[q]} → ${this.labels.key[k]}`;
  }

  magnify(factor) {
    const middle = (this.element.scrollTop + this.element.clientHeight / 2) / this.cell;
    this.zoom = Math.min(Math.max(this.zoom * factor, 1), Math.max(1, 60 / this.fitting()));
    this.layOut();
    this.element.scrollTop = middle * this.cell - this.element.clientHeight / 2;
  }

  /** Computes the cell size and the sizes of labels and canvas from the available space. */
  layOut() {
    const { queries, keys } = this.weights;
    const measure = this.canvas.getContext("2d");
    measure.font = STRONG;
    const widest = (words) => Math.min(GUTTER, Math.ceil(words.reduce((most, word) => Math.max(most, measure.measureText(word).width), 0)) + 10);
    [this.left, this.longest] = [widest(this.labels.query), widest(this.labels.key)];
    const fitting = this.fitting();
    this.cell = fitting * this.zoom;
    this.labelsFit = this.cell >= this.longest; // else the labels of columns are vertical
    this.top = this.labelsFit ? LABEL + 10 : this.longest;
    const [width, height] = [this.left + keys * this.cell + 1, this.top + queries * this.cell + 1];
    this.element.style.height = `${Math.min(height, Math.max(TALLEST, this.top + fitting * queries)) + (width > this.element.clientWidth ? 16 : 2)}px`;
    this.content.style.width = `${width}px`;
    this.content.style.height = `${height}px`;
    const ratio = window.devicePixelRatio || 1;
    this.visible = [Math.min(this.element.clientWidth, width), Math.min(this.element.clientHeight, height)];
    [this.canvas.style.width, this.canvas.style.height] = this.visible.map((size) => `${size}px`);
    [this.canvas.width, this.canvas.height] = this.visible.map((size) => Math.round(size * ratio));
    this.draw();
  }

  /** The cell size at which the whole matrix is visible, in whole pixels if possible. */
  fitting() {
    const { queries, keys } = this.weights;
    const room = Math.min((this.element.clientWidth - this.left - 4) / keys, Math.max((TALLEST - this.longest) / queries, 1.2));
    return Math.min(LARGEST, room > 4 ? Math.floor(room) : Math.max(1, room));
  }

  hit({ clientX, clientY }) {
    const frame = this.element.getBoundingClientRect();
    const [x, y] = [clientX - frame.left, clientY - frame.top];
    const k = Math.floor((x - this.left + this.element.scrollLeft) / this.cell);
    const q = Math.floor((y - this.top + this.element.scrollTop) / this.cell);
    const { queries, keys } = this.weights ?? { queries: 0, keys: 0 };
    return {
      q: y >= this.top && q >= 0 && q < queries ? q : null,
      k: x >= this.left && k >= 0 && k < keys ? k : null,
    };
  }

  /** Scrolls a cell into view. */
  reveal({ q, k }) {
    const show = (start, room, from) => (start < from ? start : start + this.cell > from + room ? start + this.cell - room : from);
    if (q !== null) this.element.scrollTop = show(q * this.cell, this.element.clientHeight - this.top, this.element.scrollTop);
    if (k !== null) this.element.scrollLeft = show(k * this.cell, this.element.clientWidth - this.left, this.element.scrollLeft);
  }

  /** The middle of a cell on the screen. */
  place({ q, k }) {
    const frame = this.element.getBoundingClientRect();
    const x = frame.left + this.left + (k + 0.5) * this.cell - this.element.scrollLeft;
    return { clientX: x, clientY: frame.top + this.top + (q + 0.5) * this.cell - this.element.scrollTop };
  }

  draw() {
    if (!this.weights) return;
    const context = this.canvas.getContext("2d");
    const ratio = window.devicePixelRatio || 1;
    const { scrollLeft: x, scrollTop: y } = this.element;
    const style = getComputedStyle(this.element);
    this.colours = Object.fromEntries(["ink", "surface", "accent"].map((name) => [name, style.getPropertyValue(`--${name}`)]));
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, ...this.visible);
    const [width, height] = [this.visible[0] - this.left, this.visible[1] - this.top];
    context.save();
    context.beginPath();
    context.rect(this.left, this.top, width, height);
    context.clip();
    context.translate(this.left - x, this.top - y);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.bitmap, 0, 0, this.weights.keys * this.cell, this.weights.queries * this.cell);
    const range = this.range(x, y, width, height);
    this.drawCells(context, range);
    this.drawIsolated(context);
    context.restore();
    this.drawLabels(context, range, x, y);
  }

  /** The visible rows and columns. */
  range(x, y, width, height) {
    const { queries, keys } = this.weights;
    const within = (from, room, count) => [Math.max(0, Math.floor(from / this.cell)), Math.min(count, Math.ceil((from + room) / this.cell))];
    return { rows: within(y, height, queries), columns: within(x, width, keys) };
  }

  drawCells(context, { rows, columns }) {
    const { cell } = this;
    const hasNumbers = cell >= READABLE;
    [context.textAlign, context.textBaseline] = ["center", "middle"];
    for (let q = rows[0]; cell >= 8 && q < rows[1]; q++) {
      for (let k = columns[0]; k < columns[1]; k++) {
        const weight = this.weights.at(q, k);
        const strength = this.strengths(q * this.weights.keys + k);
        const isBlocked = this.isBlocked({ q, k });
        const text = isBlocked ? "×" : hasNumbers && weight >= LEAST ? weight.toFixed(2).replace(/^0/, "") : "";
        context.fillStyle = inkOn(strength);
        context.font = `${isBlocked ? cell : 11}px system-ui, sans-serif`;
        if (text) context.fillText(text, (k + 0.5) * cell, (q + 0.5) * cell);
      }
    }
    if (cell < 12) return;
    context.fillStyle = this.colours.surface;
    for (let q = rows[0]; q <= rows[1]; q++) context.fillRect(columns[0] * cell, q * cell - 0.5, (columns[1] - columns[0]) * cell, 1);
    for (let k = columns[0]; k <= columns[1]; k++) context.fillRect(k * cell - 0.5, rows[0] * cell, 1, (rows[1] - rows[0]) * cell);
  }

  /** Fades all but the isolated row, column or cell, and frames a cell. */
  drawIsolated(context) {
    const { cell, isolated: { q = null, k = null } } = this;
    const [wide, high] = [this.weights.keys * cell, this.weights.queries * cell];
    if (q !== null || k !== null) {
      context.fillStyle = this.colours.surface;
      context.globalAlpha = q !== null && k !== null ? 0.35 : 0.82;
      context.beginPath();
      context.rect(0, 0, wide, high);
      if (q !== null) context.rect(0, q * cell, wide, cell);
      else context.rect(k * cell, 0, cell, high);
      context.fill("evenodd"); // all but the row or column
      context.globalAlpha = 1;
    }
    context.strokeStyle = this.colours.accent;
    context.lineWidth = 2;
    if (q !== null && k !== null) context.strokeRect(k * cell, q * cell, cell, cell);
    if (this.cursor) context.strokeRect(this.cursor.k * cell, this.cursor.q * cell, cell, cell);
  }

  drawLabels(context, { rows, columns }, x, y) {
    const { cell, isolated, cursor } = this;
    const step = Math.max(1, Math.ceil((LABEL + 1) / cell));
    const chosen = { q: isolated.q ?? cursor?.q ?? null, k: isolated.k ?? cursor?.k ?? null };
    const shown = (i, one) => i === one || (i % step === 0 && (one === null || Math.abs(i - one) >= step));
    [context.textAlign, context.textBaseline] = ["right", "middle"];
    for (let q = rows[0]; q < rows[1]; q++) {
      if (shown(q, chosen.q)) this.label(context, this.labels.query[q], q === chosen.q, this.left - 6, this.top + (q + 0.5) * cell - y, this.left - 8);
    }
    for (let k = columns[0]; k < columns[1]; k++) {
      if (!shown(k, chosen.k)) continue;
      context.save();
      context.translate(this.left + (k + 0.5) * cell - x, this.top - 6);
      if (!this.labelsFit) context.rotate(-Math.PI / 2);
      [context.textAlign, context.textBaseline] = this.labelsFit ? ["center", "alphabetic"] : ["left", "middle"];
      this.label(context, this.labels.key[k], k === chosen.k, 0, 0, this.longest - 8);
      context.restore();
    }
  }

  label(context, word, strong, x, y, room) {
    context.font = strong ? STRONG : FONT;
    context.fillStyle = strong ? this.colours.accent : this.colours.ink;
    context.fillText(shortened(context, word, room), x, y);
  }
}

function shortened(context, word, room) {
  if (context.measureText(word).width <= room) return word;
  let length = word.length;
  while (length > 1 && context.measureText(`${word.slice(0, length)}…`).width > room) length--;
  return `${word.slice(0, length)}…`;
}
