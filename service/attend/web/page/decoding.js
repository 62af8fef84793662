// Decoding: sends a sentence one token at a time to a session, in which the server keeps the keys and values of the tokens before it.

import { css, inkOn } from "./colours.js";
import { make, markCut } from "./dom.js";
import { attempt } from "./form.js";
import { attend, post, remove } from "./wire.js";

const IDLE_SECONDS = 120; // after which the server ends a session that the page has left

export class Decoding {
  constructor(section) {
    Object.assign(this, { section, isOffered: false, table: section.querySelector("table"), status: section.querySelector(".hint") });
    this.button = section.querySelector("button");
    this.button.addEventListener("click", () => (this.isDone ? this.offer(this.composed) : this.step()));
    markCut(section.querySelector(".wide"));
  }

  get isDone() {
    return this.length === this.tokens.length;
  }

  /** Begins anew with a sentence that attends to itself, with a warning unless it is causal; hidden for anything else, and if the server keeps no sessions. */
  offer(composed) {
    this.end();
    this.section.querySelector(".note").hidden = composed.request.causal === true;
    Object.assign(this, { composed, tokens: composed.isSentence && !composed.cross ? composed.tokens().query : [] });
    this.section.hidden = !this.isOffered || !this.tokens.length;
  }

  /** Ends the session, and shows nothing of it. */
  end() {
    if (this.path) remove(this.path).catch(() => {}); // it also ends when it is idle
    Object.assign(this, { sentence: {}, path: null, length: 0, rows: [], isRunning: false });
    this.draw();
  }

  /** Sends the next token, and shows its weights. */
  async step() {
    if (this.isRunning) return;
    this.isRunning = true;
    const { sentence } = this;
    const isShown = () => this.sentence === sentence;
    const act = async () => {
      const path = this.path ?? (await start(this.composed.request.layer));
      if (!isShown()) return await remove(path);
      this.path = path;
      const { tensors } = await attend(this.request(), ["attention_weights"], undefined, `${path}/attend`);
      if (!isShown()) return;
      this.length += 1;
      const { data } = tensors.attention_weights; // [heads, 1, keys]
      this.rows = Array.from({ length: data.length / this.length }, (_, head) => data.subarray(head * this.length, (head + 1) * this.length));
    };
    const succeeded = await attempt("decoding", act, isShown);
    if (!isShown()) return;
    this.isRunning = false;
    if (succeeded) this.draw();
    else this.end();
  }

  /** The body for the next token: its vectors, and the window of the whole request. */
  request() {
    const { query, key, value, window } = this.composed.request;
    const inputs = Object.entries({ query, key, value }).filter(([, tensor]) => tensor);
    const rows = Object.fromEntries(inputs.map(([name, tensor]) => [name, rowOf(tensor, this.length)]));
    return { ...rows, causal: true, ...(window && { window }), expected_length: this.length };
  }

  /** A row of weights for each head, with a column for each token so far. */
  draw() {
    const { length, tokens = [], rows } = this;
    this.button.textContent = length && this.isDone ? "Start over" : "Step";
    this.status.textContent = length ? `Token ${length} of ${tokens.length}: ${tokens[length - 1]}` : "";
    this.table.parentElement.hidden = !length;
    const titles = [make("th", { textContent: "Head", scope: "col" }), ...tokens.slice(0, length).map((token) => make("th", { textContent: token, scope: "col" }))];
    const lines = rows.map((weights, head) => make("tr", {}, make("th", { textContent: head, scope: "row" }), ...Array.from(weights, cellOf)));
    this.table.replaceChildren(make("thead", {}, make("tr", {}, ...titles)), make("tbody", {}, ...lines));
    this.table.parentElement.scrollLeft = this.table.scrollWidth; // to the last token
  }
}

/** Starts a session of a layer; its path. */
async function start(layer) {
  const { id } = await (await post("sessions", { layer, idle_seconds: IDLE_SECONDS })).json();
  return `sessions/${id}`;
}

/** Row i of a tensor [n, width] in base64, as one of [1, width]. */
function rowOf({ shape: [count, width], datatype, base64 }, i) {
  const bytes = atob(base64);
  const size = bytes.length / count;
  return { shape: [1, width], datatype, base64: btoa(bytes.slice(i * size, (i + 1) * size)) };
}

function cellOf(weight) {
  const cell = make("td", { textContent: weight.toFixed(2) });
  [cell.style.background, cell.style.color] = [css(weight), inkOn(weight)];
  return cell;
}
