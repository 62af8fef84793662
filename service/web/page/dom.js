// Elements of the page, and values that the browser stores.

export const $ = (id) => document.getElementById(id);

/** Marks a scroller with the class `cut` while part of it is hidden to the right. */
export function markCut(scroller) {
  const mark = () => scroller.classList.toggle("cut", scroller.scrollLeft + scroller.clientWidth < scroller.scrollWidth - 1);
  const resized = new ResizeObserver(mark);
  for (const element of [scroller, ...scroller.children]) resized.observe(element);
  scroller.addEventListener("scroll", mark);
}

/** A new element with these properties and children. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** A table cell for each number or null, with a bar of its size relative to the largest. `text` writes a number. */
export function bars(numbers, text) {
  const most = Math.max(...numbers.map(Math.abs)) || 1; // null counts as 0
  return numbers.map((number) => {
    const cell = make("td", { textContent: number === null ? "–" : text(number) });
    cell.style.setProperty("--share", `${(100 * Math.abs(number)) / most}%`);
    return cell;
  });
}

/** The result of `act` on window[name], localStorage or sessionStorage; undefined if the browser blocks it. */
export function inStorage(name, act) {
  try {
    return act(window[name]);
  } catch {
    return undefined;
  }
}
