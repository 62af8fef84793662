// Numbers of tensors, those of files and those of requests. Datatypes have the names that safetensors gives them, or those of requests.

const READERS = { // datatype -> bytes, and a reader of the number at a byte
  F16: [2, half],
  BF16: [2, bfloat],
  F32: [4, (at, view) => view.getFloat32(at, true)],
  F64: [8, (at, view) => view.getFloat64(at, true)],
};
const NAMES = { FP16: "F16", BF16: "BF16", FP32: "F32", FP64: "F64" }; // in requests

/** The numbers of a row of a tensor of a file, or of a vector: {dtype, shape, data: Blob}. Throws Error for numbers that are no floats. */
export async function rowOfFile({ dtype, shape, data }, row) {
  const [size, read] = READERS[dtype] ?? [];
  if (!size) throw new Error(`its embeddings are ${dtype}, and no floats`);
  const width = shape.at(-1);
  const view = new DataView(await data.slice(row * width * size, (row + 1) * width * size).arrayBuffer());
  return Array.from({ length: width }, (_, i) => read(i * size, view));
}

/**
 * The numbers of row `index` of a tensor of a request, [n, width], or [b, n, width] with a batch, of which it is in `item`: nested lists,
 * {shape, data} or {shape, datatype, base64}. Null for datatypes without fractions.
 */
export function rowOfRequest(tensor, item, index) {
  if (Array.isArray(tensor)) return Array.isArray(tensor[0][0]) ? tensor[item][index] : tensor[index];
  const { shape, datatype = "FP32", data, base64 } = tensor;
  const [rows, width] = shape.slice(-2);
  const start = ((shape.length > 2 ? item * rows : 0) + index) * width;
  if (data) return data.slice(start, start + width);
  const [size, read] = READERS[NAMES[datatype]] ?? [];
  if (!size) return null;
  const view = new DataView(Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0)).buffer);
  return Array.from({ length: width }, (_, i) => read((start + i) * size, view));
}

function half(at, view) {
  const bits = view.getUint16(at, true);
  const [exponent, fraction] = [(bits >> 10) & 31, bits & 1023];
  const size = exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024);
  return bits >> 15 ? -size : size;
}

function bfloat(at, view) {
  const wide = new DataView(new ArrayBuffer(4));
  wide.setUint16(2, view.getUint16(at, true), true);
  return wide.getFloat32(0, true);
}
