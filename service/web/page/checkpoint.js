// Safetensors files on the user's disk. Only their headers are read; tensors stay slices of the files until they are sent.

const ATTENTION = /(?:^|\.)(?!\w*norm)\w*(?:att|mixer|temporal_block)\w*\./i; // part of each tensor's name, in every family of service/checkpoints
const SHARED = /relative_attention_bias|(?:^|\.)(?:rel_embeddings|encoder\.LayerNorm)\./; // tables that layers share, and their norm (T5, DeBERTa)

/** Name -> {dtype, shape, data: Blob} for the tensors of several files. Throws Error with a text for people. */
export async function openTensors(files) {
  const tensors = new Map();
  for (const file of files) {
    const { start, header } = await readHeader(file);
    const { __metadata__, ...entries } = header; // files that transformers writes have metadata
    for (const [name, { dtype, shape, data_offsets: [begin, end] }] of Object.entries(entries)) {
      tensors.set(name, { dtype, shape, data: file.slice(start + begin, start + end) });
    }
  }
  return tensors;
}

async function readHeader(file) {
  try {
    const size = Number(new DataView(await file.slice(0, 8).arrayBuffer()).getBigUint64(0, true));
    return { start: 8 + size, header: JSON.parse(await file.slice(8, 8 + size).text()) };
  } catch {
    throw new Error(`Expected a safetensors file, got ${file.name}`);
  }
}

/** How many layers a model has, by its config or else by the first numbers in the names of its tensors. */
export function countLayers(config, tensors) {
  const { depths, num_hidden_layers, n_layer, n_layers, num_layers } = { ...config, ...config.text_config };
  if (depths) return depths.reduce((sum, depth) => sum + depth, 0);
  return num_hidden_layers ?? n_layer ?? n_layers ?? num_layers ?? 1 + Math.max(...[...tensors.keys()].map((name) => numbersIn(name)[0] ?? 0));
}

/** The attention tensors of this layer, by the numbers in their names, and tables that layers share; those of all layers if none has them. */
export function tensorsOfLayer(tensors, number, config) {
  const attention = [...tensors].filter(([name]) => ATTENTION.test(name) || SHARED.test(name));
  const place = placeOf(number, config);
  const own = attention.filter(([name]) => place.every((n, i) => numbersIn(name)[i] === n));
  return new Map(own.length ? [...own, ...attention.filter(([name]) => SHARED.test(name))] : attention);
}

/** The first numbers in the names of a layer's tensors: its own, or its stage and block in a model with stages (Swin). */
function placeOf(number, { depths }) {
  if (!depths) return [number];
  let stage = 0;
  while (number >= depths[stage]) number -= depths[stage++];
  return [stage, number];
}

/** The segments of a name that are numbers. */
function numbersIn(name) {
  return name.split(".").filter((segment) => /^\d+$/.test(segment)).map(Number);
}

/** A safetensors file of these tensors, with `metadata`, texts by name. */
export function fileOf(tensors, metadata) {
  const header = { __metadata__: metadata };
  let end = 0;
  for (const [name, { dtype, shape, data }] of tensors) header[name] = { dtype, shape, data_offsets: [end, (end += data.size)] };
  const text = new TextEncoder().encode(JSON.stringify(header));
  const padding = new Uint8Array(-text.length & 7).fill(32); // the tensors begin at a multiple of eight
  const size = new DataView(new ArrayBuffer(8));
  size.setBigUint64(0, BigInt(text.length + padding.length), true);
  return new Blob([size.buffer, text, padding, ...[...tensors.values()].map(({ data }) => data)]);
}
