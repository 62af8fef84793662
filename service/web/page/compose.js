// Controls -> what to ask: a sentence by way of /words, or a pasted request with the controls' masks and layer over its own.

import * as form from "./form.js";
import { fromWords, lengths, tokensOf, withMasks } from "./request.js";
import { get, post, Refusal } from "./wire.js";

const REMEMBERED = 32; // sentences whose vectors are kept
const PASTED = { "*": "request", "": "request" };
const TYPED = { query: "text", tokens: "text", key: "keys", value: "keys" };

const dictionary = new Map(); // what /words said, by what was asked
export const specs = new Map(); // layer -> spec

/** {request, tokens, note, cross}: the body for /attend; tokens(item, queries, keys) gives the axes' words; note is what /words said. */
export async function compose(blocked, signal) {
  return form.mode() === "request" ? composePasted(blocked) : await composeSentence(blocked, signal);
}

/** Field of each pointer that a refusal of what was composed may have; "*" is for all that have none of their own. */
export function fieldsOf(error) {
  return { ...(form.mode() === "request" ? PASTED : TYPED), ...error.fields };
}

async function composeSentence(blocked, signal) {
  const [layer, cross] = [form.value("layer"), form.isChecked("cross")];
  const read = async (field, part) => {
    try {
      return await readWords(form.value(field), layer, part, signal);
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
  const text = form.value("request");
  let body = null;
  try {
    body = JSON.parse(text);
  } catch {
    // the service says what is wrong with it, and where
  }
  if (body === null || typeof body !== "object" || Array.isArray(body)) return { request: text };
  const { select, outputs, reply, ...rest } = body; // what it asks to have replied is not what is shown
  const { queries, keys } = lengths(rest);
  const request = withMasks({ ...rest, layer: form.value("layer") }, form.masks(blocked), queries, keys);
  return { request, tokens: (item, q, k) => tokensOf(request, item, q, k) };
}

async function readWords(text, layer, part, signal) {
  const question = JSON.stringify({ text, layer, part });
  if (!dictionary.has(question)) {
    if (dictionary.size >= REMEMBERED) dictionary.clear();
    dictionary.set(question, await (await post("words", question, { signal })).json());
  }
  return dictionary.get(question);
}

async function specOf(name, signal) {
  if (!specs.has(name)) specs.set(name, (await get(`layers/${encodeURIComponent(name)}`, signal)).spec);
  return specs.get(name);
}
