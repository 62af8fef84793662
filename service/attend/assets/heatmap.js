// Pointer and keyboard control of a heat map: shows the value of the cell under the pointer or under a cursor that arrow keys move. A `map`
// object draws the cells and knows their positions. The page at / and the HTML files of POST /attend/figure use it.
//
// A cell is {q, k} (row and column), or {panel, q, k} if there are several panels; q or k is null outside of the cells.

export const NOTHING = { q: null, k: null };
const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -Infinity], End: [0, Infinity] };
const PAGES = { PageUp: -1, PageDown: 1 };
const ROWS_A_PAGE = 10; // with one panel

export class HeatMapViewer {
  /**
   * `element` takes the focus, `tip` stands beside a cell. `map` has `hit(event)` -> cell, `place(cell)` -> {clientX, clientY} of its middle,
   * `sizes()` -> [rows, columns] of each panel, `value(cell)` and `name(cell)` for the tip.
   */
  constructor(element, tip, map) {
    Object.assign(this, { element, tip, map, pointed: NOTHING, cursor: null });
    element.addEventListener("pointermove", (event) => this.point(map.hit(event), event));
    element.addEventListener("pointerdown", (event) => event.pointerType !== "mouse" && this.point(map.hit(event), event));
    element.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.leave()); // a lifted finger leaves the tip
    element.addEventListener("pointercancel", () => this.leave()); // a finger that scrolls
    element.addEventListener("keydown", (event) => this.press(event));
    element.addEventListener("focus", () => element.matches(":focus-visible") && this.move(0, 0));
    element.addEventListener("blur", () => this.release());
  }

  /** Called after each change of `pointed` and `cursor`. */
  changed() {}

  /** Called with each cell that the cursor moves to. */
  reached(cell) {}

  point(cell, event) {
    const { panel, q, k } = this.pointed;
    this.pointed = cell;
    if (cell.panel !== panel || cell.q !== q || cell.k !== k) this.changed();
    if (cell.q !== null && cell.k !== null) this.showTip(cell, event);
    else this.tip.hidden = true;
  }

  leave() {
    this.pointed = NOTHING;
    this.tip.hidden = true;
    this.changed();
  }

  release() {
    this.cursor = null;
    this.leave();
  }

  escape() {
    this.release();
  }

  press(event) {
    if (!this.map.sizes().length || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") return this.escape();
    const page = PAGES[event.key];
    const several = this.map.sizes().length > 1;
    if (page) this.move(several ? 0 : page * ROWS_A_PAGE, 0, several ? page : 0);
    else if (MOVES[event.key]) this.move(...MOVES[event.key]);
    else if (!this.act(event.key.length === 1 ? event.key.toLowerCase() : event.key)) return;
    event.preventDefault();
  }

  /** Called with each other key; returns whether it was handled. */
  act(key) {
    return false;
  }

  move(down, right, panels = 0) {
    const sizes = this.map.sizes();
    if (!sizes.length) return;
    const within = (i, count) => Math.min(Math.max(i, 0), count - 1);
    const { panel = 0, q, k } = this.cursor ?? { q: 0, k: 0 };
    const next = within(panel + panels, sizes.length);
    const [rows, columns] = sizes[next];
    this.cursor = { panel: next, q: within(q + down, rows), k: within(k + right, columns) };
    this.reached(this.cursor);
    this.changed();
    this.showTip(this.cursor, this.map.place(this.cursor));
  }

  showTip(cell, { clientX, clientY }) {
    const [value, name] = [document.createElement("strong"), document.createElement("span")];
    value.textContent = this.map.value(cell);
    name.textContent = this.map.name(cell);
    this.tip.replaceChildren(value, name);
    this.tip.hidden = false;
    const { width, height } = this.tip.getBoundingClientRect();
    const [left, top] = [clientX + 14, clientY + 16];
    this.tip.style.left = `${Math.max(4, left + width > document.documentElement.clientWidth ? clientX - width - 10 : left)}px`;
    this.tip.style.top = `${top + height > window.innerHeight ? clientY - height - 10 : top}px`;
  }
}
