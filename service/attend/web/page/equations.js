// Numbers as text: equations whose result follows from the numbers as they are shown, and tables.

import { make, markCut } from "./dom.js";

const DIGITS = 4; // significant ones, and more where a result would not follow from the numbers as they are shown
const ALL_DIGITS = 17;

/** Rows [i, q, k, q × k], whose products, as they are shown, add up to the number that is shown of `dot`. */
export function products(query, key, dot) {
  const all = Array.from(query, (number, i) => number * key[i]);
  const digits = enough((n) => number(all.reduce((sum, product) => sum + rounded(product, n), 0)) === number(dot));
  return all.map((product, i) => [i, ...shown([query[i], key[i]], product, (a, b) => a * b, digits), number(product, digits)]);
}

/** "a × b = c", by `write(...texts)` and `compute(...numbers)`. */
export function equation(inputs, result, compute, write) {
  return `${write(...shown(inputs, result, compute))} = ${number(result)}`;
}

/** Numbers with so many digits that `compute` of them, as they are shown, is what is shown of the result. */
export function shown(inputs, result, compute, digits = DIGITS) {
  const needed = enough((n) => number(compute(...inputs.map((input) => rounded(input, n))), digits) === number(result, digits));
  return inputs.map((input) => number(input, needed));
}

/** The fewest digits, at least DIGITS, that are `right`; else all. */
function enough(right) {
  for (let digits = DIGITS; digits < ALL_DIGITS; digits++) if (right(digits)) return digits;
  return ALL_DIGITS;
}

const rounded = (value, digits) => Number(value.toPrecision(digits));

/** A table with a column for each list of numbers, which may differ in length. */
export function columns(title, titles, lists) {
  const known = lists.filter(Boolean); // a request may have rows of integers
  const count = Math.max(0, ...known.map((numbers) => numbers.length));
  const rows = Array.from({ length: count }, (_, i) => [i, ...lists.map((numbers) => numbers?.[i] ?? "")]);
  return table(title, ["n", ...titles], rows);
}

/** A table that can be opened; row `marked` is set off. */
export function table(title, columns, rows, marked) {
  const line = (tag, cells) => make("tr", {}, ...cells.map((cell) => make(tag, { textContent: typeof cell === "number" ? number(cell) : cell })));
  const body = rows.map((cells, i) => Object.assign(line("td", cells), { className: i === marked ? "marked" : "" }));
  const scroller = make("div", { className: "wide tall", tabIndex: 0, role: "group", ariaLabel: title });
  scroller.append(make("table", {}, make("thead", {}, line("th", columns)), make("tbody", {}, ...body)));
  markCut(scroller);
  return make("details", {}, make("summary", { textContent: title }), scroller);
}

/** A number of so many significant digits, with a real minus sign. */
export function number(value, digits = DIGITS) {
  if (Math.abs(value) === Infinity) return value < 0 ? "−∞" : "∞";
  return String(rounded(value, digits)).replace("-", "−");
}
