"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const [figure, cursor, tip, value] = ["figure", "cursor", "tip", "value"].map((id) => document.getElementById(id));
  const svg = figure.querySelector("svg");
  for (const panel of data.panels) {
    const bytes = Uint8Array.from(atob(panel.values), (c) => c.charCodeAt(0));
    panel.numbers = new DataView(bytes.buffer);
    panel.height = Math.ceil(panel.rows.total / panel.rows.pooled);
    panel.width = Math.ceil(panel.columns.total / panel.columns.pooled);
    panel.lacks = new Set(panel.empty);
  }
  let at = null; // [panel, row, column]

  function name(axis, cell) {
    const first = cell * axis.pooled;
    const last = Math.min(first + axis.pooled, axis.total) - 1;
    if (axis.groups.length) {
      const each = axis.total / axis.groups.length;
      const [from, to] = [first, last].map((place) => `${axis.groups[Math.floor(place / each)]}, ${place % each}`);
      return last > first ? `${axis.name} ${from} to ${to}` : `${axis.name} ${from}`;
    }
    if (last > first) return `${axis.name} ${first} to ${last}`;
    return axis.words.length ? `${axis.name} ${first} “${axis.words[first]}”` : `${axis.name} ${first}`;
  }

  function describe([index, row, column]) {
    const panel = data.panels[index];
    const number = panel.numbers.getFloat32(4 * (row * panel.width + column), true);
    let said = String(Number(number.toPrecision(4)));
    if (Number.isNaN(number)) said = panel.lacks.has(row) ? "no key to attend to" : "may not attend";
    const place = `${name(panel.rows, row)} → ${name(panel.columns, column)}: ${said}`;
    return panel.title ? `${panel.title}, ${place}` : place;
  }

  function show(cell) {
    at = cell;
    cursor.hidden = cell === null;
    value.textContent = cell === null ? "\u00a0" : describe(cell);
    if (cell === null) return;
    const panel = data.panels[cell[0]];
    const [x, y, width, height] = panel.place;
    const box = svg.getBoundingClientRect();
    const scale = box.width / data.size[0];
    const [wide, high] = [(width / panel.width) * scale, (height / panel.height) * scale];
    Object.assign(cursor.style, {
      left: `${x * scale + cell[2] * wide}px`,
      top: `${y * scale + cell[1] * high}px`,
      width: `${Math.max(wide, 6)}px`,
      height: `${Math.max(high, 6)}px`,
    });
  }

  function under(event) {
    const box = svg.getBoundingClientRect();
    const scale = box.width / data.size[0];
    const [x, y] = [(event.clientX - box.left) / scale, (event.clientY - box.top) / scale];
    for (const [index, panel] of data.panels.entries()) {
      const [left, top, width, height] = panel.place;
      const column = Math.floor(((x - left) / width) * panel.width);
      const row = Math.floor(((y - top) / height) * panel.height);
      if (row >= 0 && row < panel.height && column >= 0 && column < panel.width) return [index, row, column];
    }
    return null;
  }

  figure.addEventListener("pointermove", (event) => {
    const cell = under(event);
    tip.hidden = cell === null;
    if (String(cell) !== String(at)) show(cell);
    if (cell === null) return;
    tip.textContent = describe(cell);
    const [left, top] = [event.clientX + 14, event.clientY + 18];
    tip.style.left = `${Math.max(4, Math.min(left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${top + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 8 : top}px`;
  });
  figure.addEventListener("pointerleave", () => { tip.hidden = true; show(null); });
  figure.addEventListener("focus", () => { if (at === null && figure.matches(":focus-visible")) show([0, 0, 0]); });
  figure.addEventListener("blur", () => { show(null); });
  addEventListener("resize", () => { if (at !== null) show(at); });

  const moves = { ArrowUp: [0, -1, 0], ArrowDown: [0, 1, 0], ArrowLeft: [0, 0, -1], ArrowRight: [0, 0, 1], PageUp: [-1, 0, 0], PageDown: [1, 0, 0] };
  figure.addEventListener("keydown", (event) => {
    tip.hidden = true;
    if (event.key === "Escape") show(null);
    const move = moves[event.key];
    if (!move && event.key !== "Home" && event.key !== "End") return;
    event.preventDefault();
    const [index, row, column] = at ?? [0, 0, 0];
    const clamp = (number, length) => Math.max(0, Math.min(number, length - 1));
    const to = at === null ? 0 : clamp(index + (move ? move[0] : 0), data.panels.length);
    const panel = data.panels[to];
    let [down, along] = at === null ? [0, 0] : [row + (move ? move[1] : 0), column + (move ? move[2] : 0)];
    if (event.key === "Home") along = 0;
    if (event.key === "End") along = panel.width - 1;
    show([to, clamp(down, panel.height), clamp(along, panel.width)]);
  });
})();
