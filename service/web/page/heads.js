// The row of thumbnails: the mean and every head. A click enlarges one; its checkbox includes it in the mean.

import { paint } from "./colours.js";
import { make } from "./dom.js";
import { stretch } from "./pattern.js";

const SIZE = 96; // pixels per side at most; each pixel of a larger matrix is the largest weight of a block

export class Heads {
  /** Calls `enlarge(name)` and `toggle()` on clicks; a name is "mean" or a head's number. */
  constructor(element, enlarge, toggle) {
    Object.assign(this, { element, enlarge, toggle, on: [], boxes: new Map(), count: 0 });
  }

  /** The numbers of the heads that are switched on. */
  get chosen() {
    return this.on.flatMap((on, head) => (on ? [head] : []));
  }

  get off() {
    return this.on.flatMap((on, head) => (on ? [] : [head]));
  }

  /** Switches these heads off, and all others on. */
  switchOff(off) {
    this.on = this.on.map((_, head) => !off.includes(head));
    this.on.forEach((on, head) => (this.boxes.get(head).check.checked = on));
  }

  /** Draws every thumbnail. */
  show(pattern, mean, scale) {
    this.draw("mean", mean, scale);
    pattern.squares.forEach((square, head) => this.draw(head, square, scale));
  }

  draw(name, square, scale) {
    const { canvas } = this.boxes.get(name);
    const small = square.pooled(SIZE);
    paint(canvas, small, stretch(small, scale));
  }

  mark(shown) {
    for (const [name, { box, button }] of this.boxes) {
      button.setAttribute("aria-pressed", String(name === shown));
      box.classList.toggle("off", name !== "mean" && !this.on[name]);
    }
  }

  /** Makes the thumbnails, all heads on, if the number of heads has changed. */
  build(count) {
    if (this.count === count) return;
    this.count = count;
    this.on = Array(count).fill(true);
    this.boxes.clear();
    this.element.replaceChildren(this.box("mean", "Mean"), ...this.on.map((_, head) => this.box(head, `Head ${head}`)));
  }

  box(name, label) {
    const canvas = make("canvas");
    const button = make("button", { type: "button", onclick: () => this.enlarge(name) }, canvas, make("span", { textContent: label }));
    button.dataset.head = name;
    const check = name === "mean" ? null : this.check(name);
    const box = make("div", { className: "head" }, button, ...(check ? [check] : []));
    this.boxes.set(name, { box, button, canvas, check });
    return box;
  }

  check(head) {
    const title = "Counts in the mean and in the output";
    const check = make("input", { type: "checkbox", checked: true, ariaLabel: `Head ${head} on`, title });
    check.addEventListener("change", () => {
      this.on[head] = check.checked;
      this.toggle();
    });
    return check;
  }
}
