// Safetensors files on the user's disk. Only their headers are read; tensors stay slices of the files until they are sent.

/** Name -> {dtype, shape, data: Blob} for the tensors of several files. Throws Error with a text for people. */
export async function openTensors(files) {
  const tensors = new Map();
  for (const file of files) {
    const { start, header } = await readHeader(file);
    for (const [name, { dtype, shape, data_offsets: [begin, end] }] of Object.entries(header)) {
      if (name !== "__metadata__") tensors.set(name, { dtype, shape, data: file.slice(start + begin, start + end) });
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
  const { num_hidden_layers, n_layer, n_layers, num_layers } = { ...config, ...config.text_config };
  const numbers = [...tensors.keys()].map((name) => Number(/(?:^|\.)(\d+)\./.exec(name)?.[1] ?? 0));
  return num_hidden_layers ?? n_layer ?? n_layers ?? num_layers ?? 1 + Math.max(...numbers);
}

/** The tensors with this number in their names, and tables that all layers share; all tensors if no name has the number. */
export function tensorsOfLayer(tensors, number) {
  const entries = [...tensors];
  const own = entries.filter(([name]) => name.split(".").includes(String(number)));
  return new Map(own.length ? [...own, ...entries.filter(([name]) => name.includes("relative_attention_bias"))] : entries);
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
