import { HeatMapViewer, NOTHING } from "./heatmap.js";

// The map of an HTML file: panels of an SVG, whose places and values are in the element `data`.

const data = JSON.parse(document.getElementById("data").textContent);
const [figure, cursor, tip, value] = ["figure", "cursor", "tip", "value"].map((id) => document.getElementById(id));
const svg = figure.querySelector("svg");
for (const panel of data.panels) {
  panel.values = new DataView(Uint8Array.from(atob(panel.values), (c) => c.charCodeAt(0)).buffer);
  panel.size = [panel.rows, panel.columns].map(({ total, pooled }) => Math.ceil(total / pooled));
}

/** What a cell stands for along one axis: its positions, its word, its head. */
function along(axis, cell) {
  const first = cell * axis.pooled;
  const last = Math.min(first + axis.pooled, axis.total) - 1;
  const each = axis.total / axis.groups.length;
  const [from, to] = [first, last].map((position) => (axis.groups.length ? `${axis.groups[Math.floor(position / each)]}, ${position % each}` : position));
  if (last > first) return `${axis.name} ${from} to ${to}`;
  return axis.words.length ? `${axis.name} ${first} “${axis.words[first]}”` : `${axis.name} ${from}`;
}

const map = {
  sizes: () => data.panels.map(({ size }) => size),

  value({ panel, q, k }) {
    const { values, size, empty } = data.panels[panel];
    const number = values.getFloat32(4 * (q * size[1] + k), true);
    if (Number.isNaN(number)) return empty.includes(q) ? "no key to attend to" : "may not attend";
    return String(Number(number.toPrecision(4)));
  },

  name({ panel, q, k }) {
    const { title, rows, columns } = data.panels[panel];
    return `${title ? `${title}, ` : ""}${along(rows, q)} → ${along(columns, k)}`;
  },

  hit({ clientX, clientY }) {
    const { box, scale } = this.frame();
    for (const [panel, { place: [left, top, width, height], size: [rows, columns] }] of data.panels.entries()) {
      const q = Math.floor((((clientY - box.top) / scale - top) / height) * rows);
      const k = Math.floor((((clientX - box.left) / scale - left) / width) * columns);
      if (q >= 0 && q < rows && k >= 0 && k < columns) return { panel, q, k };
    }
    return NOTHING;
  },

  place(cell) {
    const { box } = this.frame();
    const [x, y, width, height] = this.rectangle(cell);
    return { clientX: box.left + x + width / 2, clientY: box.top + y + height / 2 };
  },

  /** Of a cell, in pixels of the screen from the corner of the SVG. */
  rectangle({ panel, q, k }) {
    const { scale } = this.frame();
    const { place, size: [rows, columns] } = data.panels[panel];
    const [x, y, width, height] = place.map((length) => length * scale);
    return [x + (k * width) / columns, y + (q * height) / rows, width / columns, height / rows];
  },

  frame() {
    const box = svg.getBoundingClientRect();
    return { box, scale: box.width / data.size[0] };
  },
};

class FigureViewer extends HeatMapViewer {
  changed() {
    const cell = this.pointed.q === null ? this.cursor : this.pointed;
    cursor.hidden = cell === null;
    value.textContent = cell === null ? "\u00a0" : `${map.name(cell)}: ${map.value(cell)}`;
    if (cell === null) return;
    const [left, top, width, height] = map.rectangle(cell);
    Object.assign(cursor.style, { left: `${left}px`, top: `${top}px`, width: `${Math.max(width, 6)}px`, height: `${Math.max(height, 6)}px` });
  }
}

const viewer = new FigureViewer(figure, tip, map);
addEventListener("resize", () => viewer.changed());
