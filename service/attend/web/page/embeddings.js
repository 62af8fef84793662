// The inputs of the first attention layer of a model whose folder was dropped on the page: its tokenizer, which the service applies, its embeddings,
// and the norm before the layer. Rows of embeddings are read from the file as they are needed. Deeper layers need the layers before them, which the
// page does not compute.

import { rowOfFile } from "./tensors.js";
import { post, Refusal } from "./wire.js";

const CAPTURE = "run attend capture with the folder and a text, and drop the file that it writes here";
const MAX_CACHED = 16; // texts of each model

/**
 * How families make the input of their first layer: the names of tables and norms, as the ends of names in the file; `eps` is the name of
 * the field with the norm's epsilon, or the number. A norm with `rms` divides by the root mean square, and `plus` is added to its weight.
 * `part`: the part of the model that it is true of.
 */
const BERT = {
  tables: ["embeddings.word_embeddings", "embeddings.position_embeddings", "embeddings.token_type_embeddings"],
  norm: { name: "embeddings.LayerNorm", eps: "layer_norm_eps" },
};
const ROBERTA = { ...BERT, firstPosition: ({ pad_token_id = 1 }) => pad_token_id + 1 };
const LLAMA = { tables: ["embed_tokens"], norm: { name: "layers.0.input_layernorm", eps: "rms_norm_eps", rms: true }, options: { causal: true } };
const GEMMA = { ...LLAMA, norm: { ...LLAMA.norm, plus: 1 }, factor: ({ hidden_size }) => Math.sqrt(hidden_size) };
const FAMILIES = {
  bert: BERT,
  roberta: ROBERTA,
  "xlm-roberta": ROBERTA,
  camembert: ROBERTA,
  distilbert: { tables: BERT.tables.slice(0, 2), norm: { name: "embeddings.LayerNorm", eps: 1e-12 } },
  gpt2: { tables: ["wte", "wpe"], norm: { name: "h.0.ln_1", eps: "layer_norm_epsilon" }, options: { causal: true } },
  gpt_neox: { tables: ["embed_in"], norm: { name: "layers.0.input_layernorm", eps: "layer_norm_eps" }, options: { causal: true } },
  phi: { ...LLAMA, norm: { name: "layers.0.input_layernorm", eps: "layer_norm_eps" } },
  llama: LLAMA,
  mistral: LLAMA,
  qwen2: LLAMA,
  qwen3: LLAMA,
  phi3: LLAMA,
  gemma: GEMMA,
  gemma2: GEMMA,
  gemma3_text: GEMMA,
  t5: { tables: ["shared"], norm: { name: "encoder.block.0.layer.0.layer_norm", eps: "layer_norm_epsilon", rms: true }, part: "encoder" },
};
const EPSILONS = { layer_norm_eps: 1e-12, layer_norm_epsilon: 1e-5, rms_norm_eps: 1e-6 }; // where a config leaves them out

const layers = new Map(); // name of a layer -> {read(text)} or {needs}, a sentence

/** What is known of the inputs of a layer whose model was dropped here: {read(text)} for the first layer, or {needs}, a sentence; or undefined. */
export function inputsOf(layer) {
  return layers.get(layer);
}

/**
 * Keeps the inputs of layers that were added from a folder. `names` and `numbers` are theirs, `part` that of the model, `tensors` and `config`
 * of its files, `tokenizer` the text of tokenizer.json, if it is there. Returns the fields of a request in the model's own calls.
 */
export async function keepInputs(model, names, numbers, part, tensors, config, tokenizer) {
  const { text_config: own = config } = config;
  const family = FAMILIES[own.model_type];
  let first;
  try {
    first = { read: await reader(model, family, part, tensors, own, tokenizer) };
  } catch (error) {
    first = { needs: `The inputs of layer 0 of ${model} cannot be made here, since ${error.message}: ${CAPTURE}.` };
  }
  names.forEach((name, i) => {
    const before = numbers[i] === 1 ? "layer 0 makes" : `layers 0 to ${numbers[i] - 1} make`;
    const needs = `Layer ${numbers[i]} of ${model} needs what ${before} of the text, which this page does not compute: ${CAPTURE}.`;
    layers.set(name, numbers[i] === 0 ? first : { needs });
  });
  return family?.options ?? {};
}

/** A function from a text and a signal to {tokens, vectors, note, meaningful}. Throws Error with a reason. */
async function reader(model, family, part, tensors, config, tokenizer) {
  const known = Object.keys(FAMILIES).join(", ");
  if (!family) throw new Error(`the page knows these families: ${known}`);
  const own = family.part ?? (family.options?.causal ? "decoder" : "encoder");
  if (part && part !== own) throw new Error(`the page knows them for the ${own} alone`);
  if (!tokenizer) throw new Error("the folder has no tokenizer.json");
  const tokensOf = cachedTokens(tokenizer);
  await tokensOf(""); // says now whether the service can apply the tokenizer
  const tables = family.tables.map((name) => find(tensors, `${name}.weight`));
  const norm = await openNorm(tensors, family.norm, config);
  const factor = family.factor?.(config) ?? 1;
  const firstPosition = family.firstPosition?.(config) ?? 0;
  const note = `The weights are those of layer 0 of ${model}, and the vectors are its input for this text, made of the tokenizer and the embeddings in its folder.`;
  return async (text, signal) => {
    const { ids, tokens } = await tokensOf(text, signal);
    const most = tables.length > 1 ? tables[1].shape[0] - firstPosition : Infinity;
    if (!ids.length || ids.length > most) throw refused(ids.length ? `Expected at most ${most} tokens, got ${ids.length}` : "Expected at least one word");
    const rows = [ids, ids.map((_, i) => firstPosition + i), ids.map(() => 0)]; // of each table
    const read = await Promise.all(tables.map((table, i) => Promise.all(rows[i].map((row) => rowOfFile(table, row)))));
    const sums = ids.map((_, i) => read[0][i].map((number, j) => read.reduce((sum, table) => sum + table[i][j], 0) * factor));
    return { tokens, vectors: inBase64(sums.map(norm)), note, meaningful: true };
  };
}

/** A function from a text and a signal to the reply of the service, {ids, tokens}, which keeps the last replies. */
function cachedTokens(tokenizer) {
  const cache = new Map();
  return async (text, signal) => {
    if (!cache.has(text)) {
      const reply = await (await post("words/tokens", { tokenizer, text }, { signal })).json();
      if (cache.size >= MAX_CACHED) cache.clear();
      cache.set(text, reply);
    }
    return cache.get(text);
  };
}

const refused = (text) => new Refusal(422, text, [{ at: "/text", text }]);

/** The tensor with this end of its name. Throws Error if there is none. */
function find(tensors, end) {
  const names = [...tensors.keys()].filter((name) => name === end || name.endsWith(`.${end}`));
  if (!names.length) throw new Error(`its files have no tensor ${end}`);
  return tensors.get(names.reduce((a, b) => (b.length < a.length ? b : a)));
}

/** A function that normalises a row. */
async function openNorm(tensors, { name, eps, rms = false, plus = 0 }, config) {
  const weight = await rowOfFile(find(tensors, `${name}.weight`), 0);
  const bias = rms ? null : await rowOfFile(find(tensors, `${name}.bias`), 0);
  const epsilon = typeof eps === "number" ? eps : (config[eps] ?? EPSILONS[eps]);
  const mean = (numbers) => numbers.reduce((a, b) => a + b, 0) / numbers.length;
  return (row) => {
    const centre = rms ? 0 : mean(row);
    const size = Math.sqrt(mean(row.map((number) => (number - centre) ** 2)) + epsilon);
    return row.map((number, i) => ((number - centre) / size) * (weight[i] + plus) + (bias?.[i] ?? 0));
  };
}

/** Rows of numbers as a member of a request. */
function inBase64(rows) {
  const bytes = new Uint8Array(Float32Array.from(rows.flat()).buffer);
  let text = "";
  for (let i = 0; i < bytes.length; i += 0x8000) text += String.fromCharCode(...bytes.subarray(i, i + 0x8000));
  return { shape: [rows.length, rows[0].length], datatype: "FP32", base64: btoa(text) };
}
