// Elements of the page, and values that the browser stores.

export const $ = (id) => document.getElementById(id);

/** Marks a scroller with the class `cut` while part of it is hidden to the right, and with `below` while part is hidden below. */
export function markCut(scroller) {
  const mark = () => {
    scroller.classList.toggle("cut", scroller.scrollLeft + scroller.clientWidth < scroller.scrollWidth - 1);
    scroller.classList.toggle("below", scroller.scrollTop + scroller.clientHeight < scroller.scrollHeight - 1);
  };
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

/** The result of `act` on window[name], localStorage or sessionStorage; undefined if the browser blocks it. */
export function inStorage(name, act) {
  try {
    return act(window[name]);
  } catch {
    return undefined;
  }
}
