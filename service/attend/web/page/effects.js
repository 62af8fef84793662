// The map of layers and heads by what each does to the model's answer: the change of the logarithm of its probability without the head.

import { make } from "./dom.js";

const DARKEST = 35; // percent of the colour in a cell with the largest change, on which text stays readable

export class Effects {
  /** Calls `open(layer, head)` on clicks on a cell. */
  constructor(element, open) {
    Object.assign(this, { element, open, about: element.querySelector(".hint"), table: element.querySelector("table") });
  }

  /** Shows {answer, probability, change}, where `change` has a list for each layer by name; or nothing for null. */
  show(effects) {
    this.element.hidden = !effects;
    if (!effects) return;
    const { answer, probability, change } = effects;
    this.about.textContent = `The model’s answer to the text is “${answer}”, with probability ${probability.toFixed(2)}. Without each head alone, the logarithm of that changes by so much: the less, the more the head adds to it. The masks of this page are no part of it.`;
    const rows = Object.entries(change);
    const most = Math.max(...rows.flatMap(([, numbers]) => numbers.map(Math.abs))) || 1;
    const heads = Math.max(...rows.map(([, numbers]) => numbers.length));
    const titles = ["Layer", ...Array.from({ length: heads }, (_, head) => `Head ${head}`)].map((title) => make("th", { textContent: title, scope: "col" }));
    const lines = rows.map(([layer, numbers]) => make("tr", {}, make("th", { textContent: layer, scope: "row" }), ...numbers.map((number, head) => this.cell(layer, head, number, most))));
    this.table.replaceChildren(make("thead", {}, make("tr", {}, ...titles)), make("tbody", {}, ...lines));
  }

  cell(layer, head, number, most) {
    const text = number.toFixed(2).replace(/^-0\.00$/, "0.00").replace("-", "−");
    const button = make("button", { type: "button", textContent: text, ariaLabel: `Head ${head} of ${layer}: ${text}`, onclick: () => this.open(layer, head) });
    const cell = make("td", {}, button);
    const share = (DARKEST * Math.abs(number)) / most;
    cell.style.background = `color-mix(in srgb, var(${number < 0 ? "--accent" : "--main"}) ${share}%, transparent)`;
    return cell;
  }
}
