// All heads of all layers of one model: a row for each layer, with the pictures of its heads side by side on one canvas.

import { paint } from "./colours.js";
import { make } from "./dom.js";
import { colourFactors } from "./pattern.js";

const TILE = 48; // pixels of a head's picture per side
const GAP = 4;

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
    Object.assign(this, { section, patternOf, open, details: section.querySelector("details"), rows: new Map() });
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
    const [canvas, text] = [make("canvas", { height: TILE }), make("span", { className: "error" })];
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
    if (reply) drawHeads(row.canvas, this.patternOf(reply), scale);
  }

  fill(row, reply, refusal) {
    row.reply = reply;
    row.text.textContent = refusal;
    row.canvas.getContext("2d").clearRect(0, 0, row.canvas.width, TILE);
  }

  redraw(scale) {
    for (const { canvas, reply } of this.rows.values()) if (reply) drawHeads(canvas, this.patternOf(reply), scale);
  }
}

function drawHeads(canvas, { heads }, scale) {
  canvas.width = heads.length * (TILE + GAP) - GAP;
  const [context, tile] = [canvas.getContext("2d"), make("canvas")];
  context.imageSmoothingEnabled = false;
  heads.forEach((weights, head) => {
    const small = weights.pooled(TILE);
    paint(tile, small, colourFactors(small, scale));
    context.drawImage(tile, head * (TILE + GAP), 0, TILE, TILE);
  });
}
