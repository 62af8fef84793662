// The views of one reply: thumbnails of heads, heat map, words, statistics, steps and output. Each draws itself; this module connects them.

import { paint } from "./colours.js";
import { Decoding } from "./decoding.js";
import { $ } from "./dom.js";
import { Effects } from "./effects.js";
import { layerNames, showScale } from "./form.js";
import { Heads, layersOfModel, Model } from "./heads.js";
import { NOTHING } from "./heatmap.js";
import { Matrix } from "./matrix.js";
import { Pointing } from "./pointing.js";
import { isSpecial, lengths, omits } from "./request.js";
import { HeadStatistics, OutputChange } from "./statistics.js";
import { Steps } from "./steps.js";
import { Pattern, Weights } from "./weights.js";
import { Words } from "./words.js";

const RAMP = new Weights(Float32Array.from({ length: 128 }, (_, i) => (i + 1) / 128), 1, 128); // the colours of the legend

export class Views {
  /**
   * `blocked` has the blocked cells, "q,k". Calls `block([q, k])` to block or unblock one, `changed()` after the user chose what is shown,
   * and `open(layer, head)` for a head of another layer. The cells are counted with special tokens.
   */
  constructor(blocked, block, changed, open) {
    this.changed = changed;
    this.choice = null; // the head that the user chose: its number, or "mean"
    this.telling = "mean"; // the one that is shown if none was chosen
    this.matrix = new Matrix($("matrix"), ({ q, k }) => blocked.has(`${this.axes.query[q]},${this.axes.key[k]}`));
    this.pointing = new Pointing(this.matrix, $("tip"), $("live"), ({ q, k }) => block([this.axes.query[q], this.axes.key[k]]), () => this.locked());
    this.words = this.pointing.words = new Words($("words"), this.pointing);
    const enlarge = (name) => this.enlarge(name);
    this.heads = new Heads($("heads"), enlarge, () => this.switched());
    this.statistics = new HeadStatistics($("numbers"), enlarge);
    this.steps = new Steps($("steps"), enlarge);
    this.change = new OutputChange($("change"));
    this.decoding = new Decoding($("decoding"));
    this.model = new Model($("model"), (reply) => this.patternOf(reply), open);
    this.effects = new Effects($("effects"), open);
  }

  /** The head that is enlarged: its number, or "mean". */
  get shown() {
    return this.choice ?? this.telling;
  }

  /** The batch item that is shown. */
  get item() {
    return Number($("item").value);
  }

  /** The words of both axes, with special tokens. */
  get labels() {
    const [, , queries, keys] = this.reply.shape;
    return this.composed.tokens(this.item, queries, keys);
  }

  /** Shows a reply, without its statistics yet; `wanted` is a state as `state` returns it, or has none of its names. */
  showReply(composed, reply, wanted) {
    Object.assign(this, { composed, reply, metrics: null });
    this.showItems(wanted.item);
    this.statistics.wait();
    this.decoding.offer(composed);
    this.model.offer(layersOfModel(reply.layer.name, layerNames()), reply.layer.name);
    this.effects.show(null);
    this.heads.build(reply.shape[1]);
    if (wanted.off) this.heads.switchOff(wanted.off.split(" ").map(Number));
    if (wanted.head) this.choice = wanted.head === "mean" ? "mean" : Number(wanted.head);
    this.show();
    if (wanted.cell) {
      const [q, k] = wanted.cell.split(",").map((index) => (index ? Number(index) : null));
      this.pointing.lockAt({ q, k });
    }
  }

  /** Shows the head statistics of the reply, or none for null. */
  showMetrics(metrics) {
    this.metrics = metrics;
    if (metrics) this.statistics.show(metrics, this.item, lengths(this.composed.request).batch !== null);
    else this.statistics.clear();
    this.showRole();
  }

  /** Offers the batch items, and selects the wanted one, or else the one that was shown. */
  showItems(wanted) {
    const [count] = this.reply.shape;
    const item = Math.min(wanted ?? ($("item").value || 0), count - 1);
    $("items").hidden = count === 1;
    $("item").replaceChildren(...Array.from({ length: count }, (_, i) => new Option(String(i), String(i))));
    $("item").value = String(item);
  }

  /** What the user chose to see, as texts; "" is the default. */
  state() {
    const { q, k } = this.pointing.locked;
    return {
      item: this.item ? String(this.item) : "",
      head: this.choice === null ? "" : String(this.choice),
      off: this.heads.off.join(" "),
      cell: q === null && k === null ? "" : `${q ?? ""},${k ?? ""}`,
      model: this.model.details.open ? "1" : "",
    };
  }

  /** Forgets what the user chose to see. */
  reset() {
    [this.choice, this.pointing.locked] = [null, NOTHING];
    $("item").value = "0";
    this.heads.switchOff([]);
  }

  /** Draws everything from the reply. */
  show() {
    const { labels } = this;
    $("special-field").hidden = ![...labels.query, ...labels.key].some(isSpecial);
    const visible = (words) => words.map((_, i) => i).filter((i) => !omits(this.composed.request, words[i]));
    this.axes = { query: visible(labels.query), key: visible(labels.key) }; // indices of the words that are shown
    this.pattern = this.patternOf(this.reply);
    const shownLabels = { query: this.axes.query.map((q) => labels.query[q]), key: this.axes.key.map((k) => labels.key[k]) };
    if (JSON.stringify(shownLabels) !== JSON.stringify(this.shownLabels)) this.shownLabels = shownLabels; // else the same object: locks and zoom stay
    if (!this.pattern.heads[this.choice] && this.choice !== "mean") this.choice = null;
    this.telling = this.composed.note && !this.composed.note.meaningful ? "mean" : this.tellingHead();
    this.redraw();
    this.showChange();
    if (this.metrics) this.showMetrics(this.metrics);
  }

  /** The head whose rows differ most in how sharply they attend, special tokens apart, to which many heads attend by default. */
  tellingHead() {
    const ordinary = (words) => words.flatMap((word, i) => (isSpecial(word) ? [] : [i]));
    const [rows, columns] = [ordinary(this.shownLabels.query), ordinary(this.shownLabels.key)];
    const contrasts = this.pattern.heads.map((head) => head.part(rows, columns).entropyContrast());
    return contrasts.indexOf(Math.max(...contrasts));
  }

  /** What is shown of the weights of a reply to the same words. */
  patternOf({ weights, shape }) {
    return new Pattern(weights, shape, this.item, this.axes.query, this.axes.key);
  }

  redraw() {
    if (!this.pattern) return;
    showScale(this.pattern.keys);
    const scale = $("scale").value;
    this.mean = this.pattern.mean(this.heads.chosen);
    this.heads.show(this.pattern, this.mean, scale);
    $("all").hidden = !this.heads.off.length;
    this.model.redraw(scale);
    this.decoding.draw();
    paint($("ramp"), RAMP, "one");
    this.drawShown();
  }

  drawShown() {
    const { pattern, shown, shownLabels, heads } = this;
    const scale = $("scale").value;
    const weights = shown === "mean" ? this.mean : pattern.heads[shown];
    const name = shown === "mean" ? `Mean of ${heads.chosen.length} heads` : `Head ${shown}`;
    heads.mark(shown);
    this.matrix.show(weights, shownLabels, scale);
    this.words.show(weights, shownLabels, scale);
    this.pointing.show(weights, shownLabels, name);
    $("matrix-title").textContent = name;
    $("matrix").setAttribute("aria-label", `Attention weights, ${name}, ${pattern.queries} queries by ${pattern.keys} keys`);
    $("least").textContent = scale === "log" ? String(Number(weights.ends()[0].toPrecision(2))) : "0";
    $("most").textContent = { one: "1", row: "row's largest", all: weights.peak.toFixed(3) }[scale] ?? weights.largest().toFixed(3);
    this.statistics.mark(shown);
    this.showRole();
    this.showSteps();
  }

  /** What the enlarged head does with the words, if that means something. */
  showRole() {
    const isMeaningful = this.composed.note?.meaningful ?? true;
    $("role").textContent = isMeaningful && this.shown !== "mean" ? this.statistics.role(this.shown) : "";
  }

  /** How the weight of the locked cell is computed, if one is locked. */
  showSteps() {
    const { q, k } = this.pointing.locked;
    const { composed, reply, axes, labels } = this;
    if (q === null || k === null) return this.steps.show(composed.request, reply, null);
    const weights = this.pattern.heads.map((head) => head.at(q, k));
    const place = { item: this.item, head: this.shown, q: axes.query[q], k: axes.key[k] };
    this.steps.show(composed.request, reply, { ...place, weights, on: this.heads.chosen, labels });
  }

  /** How the output changes by the heads that are off. */
  showChange() {
    const words = this.axes.query.map((index, i) => [index, this.shownLabels.query[i]]);
    this.change.show(this.composed.request, this.heads.off, this.pattern.heads.length, this.item, words);
  }

  enlarge(name) {
    this.choice = name;
    this.drawShown();
    this.changed();
  }

  switched() {
    this.redraw();
    this.showChange();
    this.changed();
  }

  switchAllOn() {
    this.heads.switchOff([]);
    this.switched();
  }

  locked() {
    this.showSteps();
    this.changed();
  }
}
