// Elements of the page.

export const $ = (id) => document.getElementById(id);

/** A new element with these properties and children. */
export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}
