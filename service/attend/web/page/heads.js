// Thumbnails of heads. `Heads`: the mean and every head of the layer; a click enlarges one, its checkbox includes it in the mean. `Model`: all
// heads of all layers of the same model, a row for each layer.

import { paint } from "./colours.js";
import { make, markCut } from "./dom.js";

const [SMALLEST, LARGEST] = [24, 96]; // pixels of a head's picture per side, in a row of `Model`: as large as the width allows
const GAP = 4;
const MARGIN = 8; // between a row of `Model` and its border; page.css has the same
const MANY = 16; // heads; more have smaller pictures in `Heads`
const SIZE = 96; // the same in `Heads`, at most; each pixel of a larger matrix is the largest weight of a block

export class Heads {
  /** Calls `enlarge(name)` and `toggle()` on clicks; a name is "mean" or a head's number. */
  constructor(element, enlarge, toggle) {
    Object.assign(this, { element, enlarge, toggle, boxes: new Map(), checks: [] });
    markCut(element);
  }

  get count() {
    return this.checks.length;
  }

  /** The numbers of the heads that are switched on. */
  get chosen() {
    return this.checks.flatMap(({ checked }, head) => (checked ? [head] : []));
  }

  get off() {
    return this.checks.flatMap(({ checked }, head) => (checked ? [] : [head]));
  }

  /** Switches these heads off, and all others on. */
  switchOff(off) {
    this.checks.forEach((check, head) => (check.checked = !off.includes(head)));
  }

  /** Draws every thumbnail. */
  show(pattern, mean, scale) {
    for (const [name, { canvas }] of this.boxes) paint(canvas, (name === "mean" ? mean : pattern.heads[name]).pooled(SIZE), scale);
  }

  mark(shown) {
    for (const [name, { box, button }] of this.boxes) {
      button.ariaPressed = String(name === shown);
      box.classList.toggle("off", this.checks[name]?.checked === false);
    }
  }

  /** Makes the thumbnails, all heads on, if the number of heads has changed. */
  build(count) {
    if (this.count === count) return;
    this.boxes.clear();
    this.element.classList.toggle("many", count > MANY);
    const [title, onchange] = ["Counts in the mean and in the output", () => this.toggle()];
    this.checks = Array.from({ length: count }, (_, head) => make("input", { type: "checkbox", checked: true, ariaLabel: `Head ${head} on`, title, onchange }));
    this.element.replaceChildren(this.box("mean", "Mean"), ...this.checks.map((check, head) => this.box(head, `Head ${head}`, check)));
  }

  box(name, label, ...check) {
    const canvas = make("canvas");
    const button = make("button", { type: "button", onclick: () => this.enlarge(name) }, canvas, make("span", { textContent: label }));
    button.dataset.head = name;
    const box = make("div", { className: "head" }, button, ...check);
    this.boxes.set(name, { box, button, canvas });
    return box;
  }
}

/** The layers of the model of `name`, in order: names that differ from it in their last number alone. */
export function layersOfModel(name, names) {
  const parts = (other) => /^(.*?)(\d+)$/.exec(other) ?? [];
  const [, stem] = parts(name);
  const own = names.filter((other) => stem !== undefined && parts(other)[1] === stem);
  return own.sort((a, b) => parts(a)[2] - parts(b)[2]);
}

export class Model {
  /** Calls `patternOf(reply)` for what is shown of a reply, and `open(layer, head)` on a click; from the keyboard head is undefined. */
  constructor(section, patternOf, open) {
    Object.assign(this, { section, patternOf, open, details: section.querySelector("details"), rows: new Map(), scale: "head" });
    new ResizeObserver(() => this.redraw(this.scale)).observe(section);
  }

  /** Whether the user has opened the view. */
  get isOpen() {
    return !this.section.hidden && this.details.open;
  }

  /** Offers these layers, of which `current` is chosen, without their replies; hidden for fewer than two. */
  offer(names, current) {
    this.section.hidden = names.length < 2;
    if (names.join() !== [...this.rows.keys()].join()) {
      this.rows = new Map(names.map((name) => [name, this.row(name)]));
      this.section.querySelector("ol").replaceChildren(...Array.from(this.rows.values(), ({ button }) => make("li", {}, button)));
    }
    for (const [name, row] of this.rows) {
      row.button.ariaCurrent = String(name === current);
      this.fill(row, null, "");
    }
  }

  row(name) {
    const [canvas, text] = [make("canvas", { height: SMALLEST }), make("span", { className: "error" })];
    const button = make("button", { type: "button" }, make("span", { textContent: name }), canvas, text);
    const row = { button, canvas, text, reply: null };
    button.addEventListener("click", (event) => {
      const head = event.target === canvas && row.reply ? Math.floor((event.offsetX / canvas.clientWidth) * row.reply.shape[1]) : undefined;
      this.open(name, head);
    });
    return row;
  }

  /** Shows the reply of a layer, or else the text of its refusal. */
  show(name, reply, scale, refusal = "") {
    const row = this.rows.get(name);
    this.fill(row, reply, refusal);
    this.draw(row, scale);
  }

  fill(row, reply, refusal) {
    row.reply = reply;
    row.text.textContent = refusal;
    row.canvas.getContext("2d").clearRect(0, 0, row.canvas.width, row.canvas.height);
  }

  redraw(scale) {
    this.scale = scale;
    for (const row of this.rows.values()) this.draw(row, scale);
  }

  /** The heads of a row side by side, across the width of the view. */
  draw({ canvas, reply }, scale) {
    if (!reply) return;
    const { heads } = this.patternOf(reply);
    const room = Math.floor((this.section.querySelector("ol").clientWidth - 2 * MARGIN + GAP) / heads.length) - GAP;
    const size = Math.min(LARGEST, Math.max(SMALLEST, room));
    [canvas.width, canvas.height] = [heads.length * (size + GAP) - GAP, size];
    const [context, tile] = [canvas.getContext("2d"), make("canvas")];
    context.imageSmoothingEnabled = false;
    heads.forEach((weights, head) => {
      paint(tile, weights.pooled(size), scale);
      context.drawImage(tile, head * (size + GAP), 0, size, size);
    });
  }
}
