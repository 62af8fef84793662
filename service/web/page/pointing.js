// The isolated word or cell: under the pointer, or locked by a click. Updates the heat map and the words together, and announces it to screen
// readers.

import { HeatMapViewer, NOTHING } from "./heatmap.js";

const MOST_SAID = 3;

export class Pointing extends HeatMapViewer {
  /** Calls `block({q, k})` to block or unblock a cell, and `lock({q, k})` after another word or cell is locked, or none. */
  constructor(matrix, tip, live, block, lock) {
    super(matrix.element, tip, matrix);
    Object.assign(this, { live, block, lock, blocking: false, locked: NOTHING });
    matrix.element.addEventListener("click", (event) => this.click(matrix.hit(event), event));
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.escape());
  }

  /** Shows another matrix; a lock stays if the words are the same. */
  show(square, words, name) {
    if (this.wording !== words) Object.assign(this, { locked: NOTHING, pointed: NOTHING, cursor: null });
    Object.assign(this, { square, wording: words, name });
    this.tip.hidden = true;
    this.changed();
  }

  point(cell, event) {
    super.point(cell, event);
    if (event.type === "focusin") this.say(this.aloud(cell));
  }

  click(cell, event) {
    if (cell.q === null && cell.k === null) return this.escape();
    const single = cell.q !== null && cell.k !== null;
    if (single && this.blocking) return this.block(cell);
    const same = cell.q === this.locked.q && cell.k === this.locked.k;
    this.lockAt(same ? NOTHING : cell);
    this.say(same ? "Released" : `Locked: ${this.aloud(cell)}`);
    if (single) this.showTip(cell, event);
  }

  /** Locks a cell, or a word where `q` or `k` is null, if there is one at that place. */
  lockAt({ q, k }) {
    const fits = (index, count) => index === null || (index >= 0 && index < count);
    if (!this.square || !fits(q, this.square.queries) || !fits(k, this.square.keys)) return;
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
    this.say(this.aloud(cell));
  }

  changed() {
    if (!this.square) return;
    const isLocked = this.locked.q !== null || this.locked.k !== null;
    const isolated = isLocked ? this.locked : this.pointed;
    Object.assign(this.map, { isolated, cursor: this.cursor });
    this.map.draw();
    this.words.isolate(isolated, this.locked);
  }

  /** A text for a cell, or for a word and its strongest links. */
  aloud({ q, k }) {
    const { query, key } = this.wording;
    if (q !== null && k !== null) return `${this.name}: ${query[q]} to ${key[k]}, ${this.map.value({ q, k })}`;
    const others = q !== null ? key : query;
    const weights = Array.from(this.square.along(q !== null ? "query" : "key", q ?? k), (weight, i) => [weight, others[i]]);
    const strongest = weights.sort((a, b) => b[0] - a[0]).slice(0, MOST_SAID);
    const list = strongest.map(([weight, word]) => `${word} ${weight.toFixed(2)}`).join(", ");
    return q !== null ? `${query[q]} attends to ${list}` : `${key[k]} is attended to by ${list}`;
  }

  say(text) {
    this.live.textContent = text;
  }
}
