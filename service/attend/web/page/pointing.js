// The isolated word or cell: under the pointer, or locked by a click. Updates the heat map and the words together, and announces it to screen
// readers.

import { HeatMapViewer, NOTHING } from "./heatmap.js";

const MOST_ANNOUNCED = 3;

export class Pointing extends HeatMapViewer {
  /** Calls `block({q, k})` to block or unblock a cell, and `lock({q, k})` after another word or cell is locked, or none. */
  constructor(matrix, tip, live, block, lock) {
    super(matrix.element, tip, matrix);
    Object.assign(this, { live, block, lock, blocking: false, locked: NOTHING });
    matrix.element.addEventListener("click", (event) => this.click(matrix.hit(event), event));
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.escape());
  }

  /** Shows another matrix; a lock stays if the labels are the same. */
  show(weights, labels, name) {
    if (this.labels !== labels) Object.assign(this, { locked: NOTHING, pointed: NOTHING, cursor: null });
    Object.assign(this, { weights, labels, name });
    this.tip.hidden = true;
    this.changed();
  }

  point(cell, event) {
    super.point(cell, event);
    if (event.type === "focusin") this.announce(this.description(cell));
  }

  click(cell, event) {
    if (cell.q === null && cell.k === null) return this.escape();
    const single = cell.q !== null && cell.k !== null;
    if (single && this.blocking) return this.block(cell);
    const same = cell.q === this.locked.q && cell.k === this.locked.k;
    this.lockAt(same ? NOTHING : cell);
    this.announce(same ? "Released" : `Locked: ${this.description(cell)}`);
    if (single) this.showTip(cell, event);
  }

  /** Locks a cell, or a word where `q` or `k` is null, if there is one at that place. */
  lockAt({ q, k }) {
    const fits = (index, count) => index === null || (index >= 0 && index < count);
    if (!this.weights || !fits(q, this.weights.queries) || !fits(k, this.weights.keys)) return;
    this.locked = { q, k };
    this.changed();
    this.lock(this.locked);
  }

  escape() {
    this.lockAt(NOTHING);
    this.leave();
  }

  /** Keys of the heat map other than those that move the cursor. */
  act(key) {
    const cell = this.cursor ?? { q: 0, k: 0 };
    const actions = {
      Enter: () => this.click(cell, this.map.place(cell)),
      " ": () => this.click(cell, this.map.place(cell)),
      r: () => this.click({ q: cell.q, k: null }, {}),
      c: () => this.click({ q: null, k: cell.k }, {}),
      b: () => this.block(cell),
    };
    actions[key]?.();
    return key in actions;
  }

  reached(cell) {
    this.map.reveal(cell);
    this.announce(this.description(cell));
  }

  changed() {
    if (!this.weights) return;
    const isLocked = this.locked.q !== null || this.locked.k !== null;
    const isolated = isLocked ? this.locked : this.pointed;
    Object.assign(this.map, { isolated, cursor: this.cursor });
    this.map.draw();
    this.words.isolate(isolated, this.locked);
  }

  /** A text for a cell, or for a word and its strongest links. */
  description({ q, k }) {
    const { query, key } = this.labels;
    if (q !== null && k !== null) return `${this.name}: ${query[q]} to ${key[k]}, ${this.map.value({ q, k })}`;
    const others = q !== null ? key : query;
    const weights = Array.from(this.weights.along(q !== null ? "query" : "key", q ?? k), (weight, i) => [weight, others[i]]);
    const strongest = weights.sort((a, b) => b[0] - a[0]).slice(0, MOST_ANNOUNCED);
    const list = strongest.map(([weight, word]) => `${word} ${weight.toFixed(2)}`).join(", ");
    return q !== null ? `${query[q]} attends to ${list}` : `${key[k]} is attended to by ${list}`;
  }

  announce(text) {
    this.live.textContent = text;
  }
}
