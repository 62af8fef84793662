// Makes the request from the controls: from a sentence and /words, or from a pasted request with the masks and layer of the controls.

import { $ } from "./dom.js";
import * as form from "./form.js";
import { lengths, tokensOf, withMasks, withOmitted } from "./request.js";
import { get, post, Refusal } from "./wire.js";

const MAX_CACHED = 32; // replies of /words
const PASTED = { "*": "request", "": "request" };
const TYPED = { query: "text", tokens: "text", key: "keys", value: "keys" };

const cache = new Map(); // body of a request to /words -> its reply
export const specs = new Map(); // layer -> spec

/**
 * {request, tokens, texts, note, cross}: the body for /attend to `layer`; tokens(item, queries, keys) -> labels of the axes; of a sentence also
 * texts, the bodies for /words by input of the layer, and note, the reply to the first.
 */
export async function compose(layer, blocked, signal) {
  return form.mode() === "request" ? composePasted(layer, blocked) : await composeSentence(layer, blocked, signal);
}

/** JSON pointer -> field of the form, for refusals of the request; "*" for all others. */
export function fieldsOf(error) {
  return { ...(form.mode() === "request" ? PASTED : TYPED), ...error.fields };
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
  return { request, tokens: () => tokens, texts, note: query, cross };
}

function composePasted(layer, blocked) {
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
  const whole = withOmitted({ ...rest, layer }, $("special").checked);
  const request = withMasks(whole, form.masks(blocked), queries, keys);
  return { request, tokens: (item, q, k) => tokensOf(request, item, q, k) };
}

async function readWords(text, signal) {
  const body = JSON.stringify(text);
  if (!cache.has(body)) {
    if (cache.size >= MAX_CACHED) cache.clear();
    cache.set(body, await (await post("words", body, { signal })).json());
  }
  return cache.get(body);
}

/** The spec of a layer. */
export async function specOf(name, signal) {
  if (!specs.has(name)) specs.set(name, (await get(`layers/${encodeURIComponent(name)}`, signal)).spec);
  return specs.get(name);
}
