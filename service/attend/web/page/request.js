// The request from the controls: of a sentence with vectors from /words, or a pasted one with the masks and the layer of the controls.

import { $ } from "./dom.js";
import { inputsOf } from "./embeddings.js";
import * as form from "./form.js";
import { get, post, Refusal } from "./wire.js";

const SPECIAL = /^(\[(CLS|SEP|PAD|BOS|EOS)\]|<\/?s>|<(pad|bos|eos|cls|sep|start_of_turn|end_of_turn)>|<[|\uff5c].*[|\uff5c]>)$/i;
const UNKNOWN = /^(\[UNK\]|<unk>|<\|unk\|>)$/i;
const READABLE = 1024; // cells of a mask that is written as rows of 0 and 1
const MAX_CACHED = 32; // replies of /words
const HASHED = "Until then each word’s vector is drawn from a hash, so this pattern means nothing.";
const CAPTURED = "These are the inputs that the model itself gave this layer.";

const cache = new Map(); // body of a request to /words -> its reply
export const specs = new Map(); // layer -> spec

/**
 * {request, tokens, isSentence, texts, note, cross}: the body for /attend to `layer`, and tokens(item, queries, keys) -> labels of the axes. For
 * a sentence also texts, the bodies for /words by input of the layer, unless the page made the vectors; note, the reply to the first; cross,
 * whether there is a second sentence. Captured inputs have a note too.
 */
export async function compose(layer, blocked, signal) {
  return form.mode() === "request" ? composePasted(layer, blocked) : await composeSentence(layer, blocked, signal);
}

async function composeSentence(layer, blocked, signal) {
  const [texts, sides, cross] = [{}, {}, $("cross").checked];
  const read = async (part, field) => {
    texts[part] = { layer, text: $(field).value, part };
    try {
      sides[part] = await readWords(texts[part], signal);
    } catch (error) {
      if (error instanceof Refusal) error.fields = { text: field };
      throw error;
    }
  };
  await read("query", "text");
  const { d_model, key_dim, value_dim } = await specOf(layer, signal);
  const others = cross ? "keys" : "text";
  if (cross || key_dim !== d_model || value_dim !== key_dim) await read("key", others);
  if (value_dim !== key_dim) await read("value", others);
  const { query, key, value } = sides;
  const tokens = { query: query.tokens, key: (key ?? query).tokens };
  const body = { layer, query: query.vectors, ...(key && { key: key.vectors }), ...(value && { value: value.vectors }) };
  const whole = withOmitted({ ...body, tokens: key ? tokens : { query: query.tokens } }, $("special").checked);
  const request = withMasks(whole, form.masks(blocked), tokens.query.length, tokens.key.length);
  const isOwn = Boolean(inputsOf(layer)?.read); // the page made the vectors
  const note = [key ? joinedNotes(query.note, key.note) : query.note, ...(isOwn ? unknownNote(request) : [])].join(" ");
  return { request, tokens: () => tokens, isSentence: true, texts: isOwn ? undefined : texts, note: { ...query, note }, cross };
}

/** The note of the queries, and what is said of the keys alone, such as words that the model does not know. */
function joinedNotes(note, other) {
  const sentences = (text) => text.split(/(?<=\.) /);
  const more = sentences(other).filter((sentence) => !sentences(note).includes(sentence));
  return [note, ...(more.length ? [`In the second sentence: ${more.join(" ")}`] : [])].join(" ");
}

function composePasted(layer, blocked) {
  const text = form.pasted(layer);
  let body = null;
  try {
    body = JSON.parse(text);
  } catch {
    // the service says where the error is
  }
  if (body === null || typeof body !== "object" || Array.isArray(body)) return { request: text };
  const { select, outputs, reply, ...rest } = body; // the page needs its own outputs
  const { queries, keys } = lengths(rest);
  const whole = withOmitted({ ...rest, layer }, $("special").checked);
  const captured = form.isCaptured(layer, text);
  const own = captured && layer !== $("layer").value; // the controls have the masks of the chosen layer
  const request = withMasks(whole, own ? { blocked } : form.masks(blocked), queries, keys);
  const note = captured ? { note: [CAPTURED, ...unknownNote(request)].join(" "), meaningful: true } : undefined;
  return { request, tokens: (item, q, k) => tokensOf(request, item, q, k), note };
}

/** A sentence about the tokens that stand for unknown words, if there are any. */
function unknownNote({ tokens }) {
  const unknown = new Set([tokens?.query, tokens?.key].flat(2).filter((token) => UNKNOWN.test(token ?? "")));
  return unknown.size ? [`The token ${[...unknown].join(", ")} stands for a word that the model does not know.`] : [];
}

/** Tokens and vectors of a text, by the page for the first layer of a model that was dropped here, else by the service. */
async function readWords(text, signal) {
  const own = inputsOf(text.layer);
  if (own?.read) return await own.read(text.text, signal);
  const words = await wordsOf(text, signal);
  return own ? { ...words, note: `${own.needs} ${HASHED}`, needs: own.needs } : words;
}

async function wordsOf(text, signal) {
  const body = JSON.stringify(text);
  if (!cache.has(body)) {
    if (cache.size >= MAX_CACHED) cache.clear();
    cache.set(body, await (await post("words", body, { signal })).json());
  }
  return cache.get(body);
}

/**
 * What each head of the layers of a model does to its answer: {answer, probability, change}, with a list of `change` for each layer by name; null
 * where that is not known.
 */
export async function effectsOf({ request, texts, note, cross }, names, signal) {
  if (form.mode() === "request") return note ? form.effectsOf(request.layer) : null;
  if (!texts || cross || !note.meaningful) return null;
  const { effects } = await wordsOf({ ...texts.query, effects: true }, signal);
  return effects && { ...effects, change: Object.fromEntries(effects.change.map((numbers, i) => [names[i], numbers])) };
}

/** The spec of a layer. */
export async function specOf(name, signal) {
  if (!specs.has(name)) specs.set(name, (await get(`layers/${encodeURIComponent(name)}`, signal)).spec);
  return specs.get(name);
}

/** The body with the masks of the controls instead of its own; fields that the controls cannot show are unchanged. */
function withMasks(body, masks, queries, keys) {
  const request = { ...body };
  const set = (name, value) => {
    if (value === null || value === false) delete request[name];
    else if (value !== undefined) request[name] = value;
  };
  set("causal", masks.causal);
  set("window", masks.window);
  set("valid_lens", masks.length);
  set("query_offset", masks.offset);
  if (masks.blocked.size) request.block_mask = blockMask(body.block_mask, masks.blocked, queries, keys);
  return request;
}

/** Rows of 0 and 1 (1 = blocked), or base64 for large masks; added to an existing mask of the same shape. */
function blockMask(before, blocked, queries, keys) {
  const rows = Array.isArray(before) && before.length === queries && before[0]?.length === keys && typeof before[0][0] !== "object" ? before : null;
  if (before && !rows) throw refusalAt("/block_mask", "Expected a block_mask of [queries, keys] rows to add cells to, got another");
  const mask = Array.from({ length: queries }, (_, q) => Array.from({ length: keys }, (_, k) => (blocked.has(`${q},${k}`) || rows?.[q][k] ? 1 : 0)));
  if (queries * keys <= READABLE) return mask;
  const bytes = mask.map((row) => String.fromCharCode(...row)).join("");
  return { shape: [queries, keys], datatype: "UINT8", base64: btoa(bytes) };
}

/** The body with the outputs of the heads `off`, of `count`, multiplied by 0. */
export function withoutHeads(body, off, count) {
  const { head_scale: given } = body;
  if (given && !Array.isArray(given)) throw refusalAt("/head_scale", "Expected a list, to switch heads off, got another form");
  const scaled = (factors) => Array.from({ length: count }, (_, head) => (off.includes(head) ? 0 : (factors?.[head] ?? 1)));
  return { ...body, head_scale: Array.isArray(given?.[0]) ? given.map(scaled) : scaled(given) };
}

const refusalAt = (at, text) => new Refusal(422, text, [{ at, text }]);

/** {batch, queries, keys} from the shapes of query and key; batch is null without that axis. */
export function lengths({ query, key }) {
  const shape = (tensor) => (Array.isArray(tensor) ? nestedShape(tensor) : (tensor?.shape ?? []));
  const [q, k] = [shape(query), shape(key ?? query)];
  return { batch: q.length === 3 ? q[0] : null, queries: q.at(-2), keys: k.at(-2) };
}

function nestedShape(list) {
  return Array.isArray(list) ? [list.length, ...nestedShape(list[0])] : [];
}

/** Labels of the axes of one batch item: the request's tokens, or numbers. */
function tokensOf(request, item, queries, keys) {
  const given = (words) => (Array.isArray(words?.[0]) ? words[item] : words);
  const numbers = (count) => Array.from({ length: count }, (_, i) => String(i));
  const query = given(request.tokens?.query) ?? numbers(queries);
  const key = given(request.tokens?.key) ?? (request.key === undefined && queries === keys ? query : numbers(keys));
  return { query, key };
}

/** The body with special tokens left out of pictures and statistics, or not; a list of other tokens to leave out is unchanged. */
function withOmitted(body, special) {
  if (!body.tokens || (!special && body.tokens.omit !== "special")) return body;
  const { omit, ...tokens } = body.tokens;
  return { ...body, tokens: special ? { ...tokens, omit: "special" } : tokens };
}

/** Whether a body leaves a token out of pictures and statistics. */
export function omits({ tokens }, token) {
  return tokens?.omit === "special" ? isSpecial(token) : (tokens?.omit?.includes(token) ?? false);
}

/** Whether a token marks the beginning, the end or the padding of a sequence, or a turn in it; as `is_special` of the service decides. */
export function isSpecial(token) {
  return SPECIAL.test(token);
}
