// Makes the request from the controls: from a sentence and /words, or from a pasted request with the masks and layer of the controls.

import { $ } from "./dom.js";
import * as form from "./form.js";
import { fromWords, lengths, tokensOf, withMasks } from "./request.js";
import { get, post, Refusal } from "./wire.js";

const MAX_CACHED = 32; // replies of /words
const PASTED = { "*": "request", "": "request" };
const TYPED = { query: "text", tokens: "text", key: "keys", value: "keys" };

const cache = new Map(); // body of a request to /words -> its reply
export const specs = new Map(); // layer -> spec

/** {request, tokens, note, cross}: the body for /attend; tokens(item, queries, keys) -> labels of the axes; note: the reply of /words. */
export async function compose(blocked, signal) {
  return form.mode() === "request" ? composePasted(blocked) : await composeSentence(blocked, signal);
}

/** JSON pointer -> field of the form, for refusals of the request; "*" for all others. */
export function fieldsOf(error) {
  return { ...(form.mode() === "request" ? PASTED : TYPED), ...error.fields };
}

async function composeSentence(blocked, signal) {
  const [layer, cross] = [$("layer").value, $("cross").checked];
  const read = async (field, part) => {
    try {
      return await readWords($(field).value, layer, part, signal);
    } catch (error) {
      if (error instanceof Refusal) error.fields = { text: field };
      throw error;
    }
  };
  const sides = { query: await read("text", "query") };
  const spec = await specOf(layer, signal);
  const others = cross ? "keys" : "text";
  if (cross || spec.key_dim !== sides.query.vectors.shape[1]) sides.key = await read(others, "key");
  if (spec.value_dim !== spec.key_dim) sides.value = await read(others, "value");
  if (sides.value && !sides.key) sides.key = await read(others, "key");
  const tokens = { query: sides.query.tokens, key: (sides.key ?? sides.query).tokens };
  const request = withMasks(fromWords(layer, sides), form.masks(blocked), tokens.query.length, tokens.key.length);
  return { request, tokens: () => tokens, note: sides.query, cross };
}

function composePasted(blocked) {
  const text = $("request").value;
  let body = null;
  try {
    body = JSON.parse(text);
  } catch {
    // the service says where the error is
  }
  if (body === null || typeof body !== "object" || Array.isArray(body)) return { request: text };
  const { select, outputs, reply, ...rest } = body; // the page needs its own outputs
  const { queries, keys } = lengths(rest);
  const request = withMasks({ ...rest, layer: $("layer").value }, form.masks(blocked), queries, keys);
  return { request, tokens: (item, q, k) => tokensOf(request, item, q, k) };
}

async function readWords(text, layer, part, signal) {
  const body = JSON.stringify({ text, layer, part });
  if (!cache.has(body)) {
    if (cache.size >= MAX_CACHED) cache.clear();
    cache.set(body, await (await post("words", body, { signal })).json());
  }
  return cache.get(body);
}

async function specOf(name, signal) {
  if (!specs.has(name)) specs.set(name, (await get(`layers/${encodeURIComponent(name)}`, signal)).spec);
  return specs.get(name);
}
