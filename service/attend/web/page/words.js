// Words of queries on the left, of keys on the right, and lines between them for the weights. Each word is a button, for keyboard and screen
// readers. The lines are on one canvas of the size of the visible part.

import { css, inkOn } from "./colours.js";
import { make } from "./dom.js";

const ROW = 28; // pixels; page.css has the same
const LINES = 4; // per word, if none is isolated
const LINES_OF_ONE = 64; // of an isolated word

export class Words {
  /** `handlers` has point({q, k}), leave() and click({q, k}). */
  constructor(element, handlers) {
    Object.assign(this, { element, handlers, isolated: {}, locked: {}, weights: null });
    this.canvas = make("canvas", { ariaHidden: "true" });
    this.sides = { q: this.side("q", "Queries"), k: this.side("k", "Keys") };
    element.append(this.sides.q.list, this.canvas, this.sides.k.list);
    element.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(element);
  }

  side(axis, name) {
    const list = make("ul", { ariaLabel: name });
    list.dataset.axis = axis;
    const cell = (event) => {
      const button = event.target.closest("button");
      return button && { q: null, k: null, [axis]: Number(button.dataset.index) };
    };
    const point = (event) => cell(event) && this.handlers.point(cell(event), event);
    list.addEventListener("pointerover", (event) => event.pointerType === "mouse" && point(event));
    list.addEventListener("focusin", (event) => event.target.matches(":focus-visible") && point(event));
    list.addEventListener("pointerleave", () => this.handlers.leave());
    list.addEventListener("focusout", () => this.handlers.leave());
    list.addEventListener("click", (event) => cell(event) && this.handlers.click(cell(event), event));
    return { list, words: null, buttons: [], touched: [] };
  }

  /** Shows a matrix of weights with the labels of its axes. */
  show(weights, labels, scale) {
    const strengthsOfLines = weights.strengths(scale === "log" ? "head" : scale); // on a logarithmic scale all lines would be thick
    Object.assign(this, { weights, strengths: weights.strengths(scale), strengthsOfLines, strongest: null });
    this.fill(this.sides.q, labels.query);
    this.fill(this.sides.k, labels.key);
    this.draw();
  }

  fill(side, words) {
    if (side.words === words) return;
    Object.assign(side, { words, touched: [] });
    side.buttons = words.map((word, index) => {
      const button = make("button", { type: "button", title: word, ariaPressed: "false" }, make("span", { textContent: word }));
      button.dataset.index = index;
      return button;
    });
    side.list.replaceChildren(...side.buttons.map((button) => make("li", {}, button)));
  }

  isolate(isolated, locked) {
    Object.assign(this, { isolated, locked });
    this.draw();
  }

  draw() {
    if (!this.weights) return;
    const { q = null, k = null } = this.isolated;
    this.shade(this.sides.q, q === null && k !== null ? this.weights.along("key", k) : null, q, this.locked.q, (i) => i * this.weights.keys + k);
    this.shade(this.sides.k, q !== null ? this.weights.along("query", q) : null, k, this.locked.k, (i) => q * this.weights.keys + i);
    const links = this.lines(q, k);
    const most = links[0]?.[2] || 1;
    const isAlone = q !== null || k !== null; // lines of one word are scaled to its strongest
    this.drawLines(links, isAlone ? ([, , weight]) => weight / most : ([query, key]) => this.strengthsOfLines(query * this.weights.keys + key));
  }

  /** Colours the words of one side by their weight, and shows weights of 0.005 and more. Only visible words are updated, for speed. */
  shade(side, weights, chosen, locked, index) {
    const [from, to] = this.visible(side.buttons.length);
    for (const button of side.touched) this.style(button, 0, "", false, false);
    side.touched = side.buttons.slice(from, to);
    side.touched.forEach((button, at) => {
      const i = from + at;
      const strength = weights ? this.strengths(index(i)) : 0;
      this.style(button, strength, weights && weights[i] >= 0.005 ? weights[i].toFixed(2) : "", i === chosen, i === locked);
    });
  }

  style(button, strength, weight, isChosen, isLocked) {
    button.style.background = strength > 0.02 ? css(strength) : "";
    button.style.color = strength > 0.02 ? inkOn(strength) : "";
    button.dataset.weight = weight;
    button.classList.toggle("chosen", isChosen);
    button.ariaPressed = String(isLocked);
  }

  /** The first visible word, and the one after the last. */
  visible(count) {
    const { scrollTop, clientHeight } = this.element;
    return [Math.max(0, Math.floor(scrollTop / ROW) - 1), Math.min(count, Math.ceil((scrollTop + clientHeight) / ROW) + 1)];
  }

  lines(q, k) {
    const strongest = (links) => links.sort((a, b) => b[2] - a[2]).slice(0, LINES_OF_ONE);
    if (q !== null) return strongest(Array.from(this.weights.along("query", q), (weight, key) => [q, key, weight]));
    if (k !== null) return strongest(Array.from(this.weights.along("key", k), (weight, query) => [query, k, weight]));
    this.strongest ??= this.weights.links(LINES * Math.max(this.weights.queries, this.weights.keys));
    const [from, to] = this.visible(Infinity);
    const isVisible = (i) => i >= from && i < to;
    return this.strongest.filter(([query, key]) => isVisible(query) && isVisible(key)); // lines to hidden words are omitted
  }

  drawLines(links, strengthOf) {
    const { clientWidth: width, offsetWidth: offset } = this.canvas;
    const height = Math.min(this.element.clientHeight, ROW * Math.max(this.weights.queries, this.weights.keys));
    if (!offset || !height) return;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.style.height = `${height}px`;
    [this.canvas.width, this.canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.strokeStyle = getComputedStyle(this.element).getPropertyValue("--accent");
    const top = this.element.scrollTop;
    for (const link of links) {
      const [q, k] = link;
      const [from, to] = [(q + 0.5) * ROW - top, (k + 0.5) * ROW - top];
      const strength = Math.min(1, strengthOf(link));
      if (strength < 0.02 || Math.max(from, to) < 0 || Math.min(from, to) > height) continue;
      context.globalAlpha = strength;
      context.lineWidth = 0.5 + 2.5 * strength;
      context.beginPath();
      context.moveTo(0, from);
      context.bezierCurveTo(width / 2, from, width / 2, to, width, to);
      context.stroke();
    }
  }
}
