// The row of thumbnails: the mean and every head. A click enlarges one; its checkbox includes it in the mean.

import { paint } from "./colours.js";
import { make } from "./dom.js";
import { colourFactors } from "./pattern.js";

const SIZE = 96; // pixels per side at most; each pixel of a larger matrix is the largest weight of a block

export class Heads {
  /** Calls `enlarge(name)` and `toggle()` on clicks; a name is "mean" or a head's number. */
  constructor(element, enlarge, toggle) {
    Object.assign(this, { element, enlarge, toggle, boxes: new Map(), checks: [] });
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
    this.draw("mean", mean, scale);
    pattern.heads.forEach((weights, head) => this.draw(head, weights, scale));
  }

  draw(name, weights, scale) {
    const { canvas } = this.boxes.get(name);
    const small = weights.pooled(SIZE);
    paint(canvas, small, colourFactors(small, scale));
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
