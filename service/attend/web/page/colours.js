// Colours of weights in the light and the dark theme. Lightness alone has the meaning, so they are readable in grey and by colour-blind people.

import { inStorage } from "./dom.js";

const RAMPS = {
  light: [[244, 247, 252], [198, 219, 239], [107, 174, 214], [33, 113, 181], [8, 48, 107]],
  dark: [[24, 32, 43], [27, 58, 92], [44, 115, 168], [124, 192, 232], [242, 251, 255]],
};
const ZERO = { light: [233, 228, 220], dark: [8, 10, 13] }; // the colour of exactly 0
const STEPS = 256;

let theme = "light"; // or "dark"
let table = ramp(RAMPS.light);

/** Uses the theme chosen by `select`, which is stored, or else that of the system; calls `changed` after each change. */
export function followTheme(select, changed) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    theme = select.value || (dark.matches ? "dark" : "light");
    table = ramp(RAMPS[theme]);
    document.documentElement.dataset.theme = theme;
    changed();
  };
  select.value = inStorage("localStorage", (storage) => storage.getItem("theme")) ?? "";
  select.addEventListener("change", () => {
    inStorage("localStorage", (storage) => storage.setItem("theme", select.value));
    apply();
  });
  dark.addEventListener("change", apply);
  apply();
}

/** [r, g, b] of a number in 0..1; exactly 0 has a separate colour. Negative numbers have that of the smallest positive ones. */
function colour(value) {
  return value === 0 ? ZERO[theme] : table[Math.max(0, Math.min(STEPS - 1, Math.floor(value * STEPS)))];
}

/** The colour in CSS. */
export function css(value) {
  return `rgb(${colour(value).join(" ")})`;
}

/** The text colour with enough contrast on it. */
export function inkOn(value) {
  const [r, g, b] = colour(value);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 120 ? "#0b1017" : "#ffffff";
}

/** Draws each weight as one pixel, coloured by the `scale` (see Weights.strengths); sets the size of the canvas. */
export function paint(canvas, weights, scale) {
  const { data, queries, keys } = weights;
  const strength = weights.strengths(scale);
  [canvas.width, canvas.height] = [keys, queries];
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(keys, queries);
  const packed = new Uint32Array(pixels.data.buffer);
  const bytes = ([r, g, b]) => (255 << 24) | (b << 16) | (g << 8) | r;
  const colours = Uint32Array.from(table, bytes);
  const zero = bytes(ZERO[theme]);
  for (let i = 0; i < data.length; i++) {
    packed[i] = data[i] === 0 ? zero : colours[Math.max(0, Math.min(STEPS - 1, (strength(i) * STEPS) | 0))];
  }
  context.putImageData(pixels, 0, 0);
}

function ramp(stops) {
  return Array.from({ length: STEPS }, (_, i) => {
    const place = (i / (STEPS - 1)) * (stops.length - 1);
    const low = Math.min(Math.floor(place), stops.length - 2);
    return stops[low].map((from, c) => Math.round(from + (stops[low + 1][c] - from) * (place - low)));
  });
}
