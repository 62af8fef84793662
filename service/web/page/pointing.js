// What is isolated: the word or cell that is pointed at, or the one that a click has locked. Keeps the heat map and the words together,
// shows the number beside the pointer, and says aloud what a keyboard reaches.

const MOST_SAID = 3;
const NOTHING = { q: null, k: null };

export class Pointing {
  /** `block({q, k})` is told of cells to block, or to free again. */
  constructor(tip, live, block) {
    Object.assign(this, { tip, live, block, blocking: false, pointed: NOTHING, locked: NOTHING, cursor: null });
  }

  /** Takes the two views, which are made with this object to tell. */
  serve(matrix, words) {
    Object.assign(this, { matrix, words });
    matrix.element.addEventListener("keydown", (event) => this.press(event));
    matrix.element.addEventListener("focus", () => matrix.element.matches(":focus-visible") && this.move(0, 0));
    matrix.element.addEventListener("blur", () => this.leaveCursor());
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.release());
  }

  /** Takes what is shown from now on; a lock stays where the words are the same. */
  show(square, words, name) {
    if (this.wording !== words) Object.assign(this, { locked: NOTHING, pointed: NOTHING, cursor: null });
    Object.assign(this, { square, wording: words, name });
    this.update();
  }

  point(cell, event) {
    const moved = cell.q !== this.pointed.q || cell.k !== this.pointed.k;
    this.pointed = cell;
    if (moved) this.update();
    if (event.type === "focusin") this.say(this.aloud(cell));
    if (cell.q !== null && cell.k !== null) this.showTip(cell, event);
    else this.tip.hidden = true;
  }

  leave() {
    this.pointed = NOTHING;
    this.tip.hidden = true;
    this.update();
  }

  click(cell, event) {
    if (cell.q === null && cell.k === null) return this.release();
    const single = cell.q !== null && cell.k !== null;
    if (single && this.blocking) return this.block(cell);
    const same = cell.q === this.locked.q && cell.k === this.locked.k;
    this.locked = same ? NOTHING : cell;
    this.update();
    this.say(same ? "Released" : `Locked: ${this.aloud(cell)}`);
    if (single) this.showTip(cell, event);
  }

  release() {
    Object.assign(this, { locked: NOTHING, pointed: NOTHING });
    this.tip.hidden = true;
    this.update();
  }

  press(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const cell = this.cursor ?? { q: 0, k: 0 };
    const actions = {
      Enter: () => this.click(cell, this.matrix.place(cell)),
      " ": () => this.click(cell, this.matrix.place(cell)),
      r: () => this.click({ q: cell.q, k: null }, {}),
      c: () => this.click({ q: null, k: cell.k }, {}),
      b: () => this.block(cell),
      Home: () => this.move(0, -Infinity),
      End: () => this.move(0, Infinity),
      PageUp: () => this.move(-10, 0),
      PageDown: () => this.move(10, 0),
    };
    const act = moves[event.key] ? () => this.move(...moves[event.key]) : actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act || !this.square || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  }

  move(down, right) {
    if (!this.square) return;
    const within = (i, count) => Math.min(Math.max(i, 0), count - 1);
    const { q, k } = this.cursor ?? { q: 0, k: 0 };
    this.cursor = { q: within(q + down, this.square.queries), k: within(k + right, this.square.keys) };
    this.matrix.reveal(this.cursor);
    this.update();
    this.showTip(this.cursor, this.matrix.place(this.cursor));
    this.say(this.aloud(this.cursor));
  }

  leaveCursor() {
    this.cursor = null;
    this.leave();
  }

  update() {
    if (!this.square) return;
    const isLocked = this.locked.q !== null || this.locked.k !== null;
    const isolated = isLocked ? this.locked : this.pointed;
    Object.assign(this.matrix, { isolated, cursor: this.cursor });
    this.matrix.draw();
    this.words.isolate(isolated, this.locked);
  }

  showTip({ q, k }, { clientX, clientY }) {
    const [words, number] = [document.createElement("span"), document.createElement("strong")];
    words.textContent = `${this.wording.query[q]} → ${this.wording.key[k]}`;
    number.textContent = written(this.square.at(q, k));
    this.tip.replaceChildren(number, words);
    this.tip.hidden = false;
    const { width, height } = this.tip.getBoundingClientRect();
    const [left, top] = [clientX + 14, clientY + 16];
    this.tip.style.left = `${Math.max(4, left + width > document.documentElement.clientWidth ? clientX - width - 10 : left)}px`;
    this.tip.style.top = `${top + height > window.innerHeight ? clientY - height - 10 : top}px`;
  }

  /** A cell, or a word with what it is linked to most, in words. */
  aloud({ q, k }) {
    const { query, key } = this.wording;
    if (q !== null && k !== null) return `${this.name}: ${query[q]} to ${key[k]}, ${written(this.square.at(q, k))}`;
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

/** A weight in four significant digits; an exact 0 as itself. */
function written(weight) {
  return weight === 0 ? "0" : weight < 0.001 ? weight.toExponential(2) : weight.toFixed(4);
}
