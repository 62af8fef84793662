// Values that the browser stores: nothing is stored where it blocks that.

/** The result of `act` on window[name], localStorage or sessionStorage; undefined if the browser blocks it. */
export function inStorage(name, act) {
  try {
    return act(window[name]);
  } catch {
    return undefined;
  }
}
