// Head statistics: a table with a row for each head, from what POST /attend/analysis replies.

/** Fills `table` with `metrics` {name: [h]}; `columns` is [[name, title, digits, about]]. A click on a head calls `enlarge`. */
export function showNumbers(table, metrics, columns, enlarge) {
  const known = columns.filter(([name]) => Array.isArray(metrics[name]));
  const head = document.createElement("thead");
  head.append(row([cell("th", "Head", "col"), ...known.map(([, title, , about]) => Object.assign(cell("th", title, "col"), { title: about }))]));
  const body = document.createElement("tbody");
  const count = Math.max(0, ...known.map(([name]) => metrics[name].length));
  for (let h = 0; h < count; h++) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = `Head ${h}`;
    button.addEventListener("click", () => enlarge(h));
    const name = cell("th", "", "row");
    name.append(button);
    const line = row([name, ...known.map(([metric, , digits]) => numberCell(metrics[metric], h, digits))]);
    line.dataset.head = h;
    body.append(line);
  }
  table.replaceChildren(head, body);
}

export function markNumbers(table, shown) {
  for (const line of table.querySelectorAll("tbody tr")) line.classList.toggle("shown", Number(line.dataset.head) === shown);
}

/** A number, and a bar behind it as long as it is beside the other heads'. */
function numberCell(values, h, digits) {
  const value = values[h];
  const element = cell("td", value === null || value === undefined ? "–" : value.toFixed(digits));
  const most = Math.max(...values.map((other) => Math.abs(other ?? 0))) || 1;
  element.style.setProperty("--share", `${(100 * Math.abs(value ?? 0)) / most}%`);
  return element;
}

function row(cells) {
  const element = document.createElement("tr");
  element.append(...cells);
  return element;
}

function cell(tag, text, scope) {
  const element = document.createElement(tag);
  element.textContent = text;
  if (scope) element.scope = scope;
  return element;
}
