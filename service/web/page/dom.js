// Elements of the page.

export const $ = (id) => document.getElementById(id);

/** A new element with these properties and children. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}
