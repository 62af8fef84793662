// HTTP: requests as JSON, replies as safetensors, refusals as problem details.

const JSON_TYPE = "application/json";
const TENSORS = "application/vnd.safetensors";
const cached = new WeakMap(); // request -> {outputs: promise of the reply}
export let apiKey = ""; // sent with every request; "" for none

/** A refusal of the service, or of the page itself. `problems` are {at, text}, `at` a JSON pointer into the request; by default the message. */
export class Refusal extends Error {
  constructor(status, message, problems = []) {
    super(message);
    this.status = status;
    this.problems = problems.length ? problems : [{ at: "", text: message }];
  }
}

export function setApiKey(key) {
  apiKey = key;
}

/** Sends `body`, an object or text, and returns the response. Throws Refusal, or AbortError. */
export async function post(path, body, { accept = JSON_TYPE, signal } = {}) {
  const text = typeof body === "string" ? body : JSON.stringify(body);
  return await send(path, { method: "POST", body: text, headers: { "Content-Type": JSON_TYPE, Accept: accept }, signal });
}

/** PUT of a safetensors file, a Blob. */
export async function putTensors(path, body) {
  await send(path, { method: "PUT", body, headers: { "Content-Type": TENSORS, Accept: JSON_TYPE } });
}

/** DELETE. */
export async function remove(path) {
  await send(path, { method: "DELETE" });
}

/** GET of a JSON document. */
export async function get(path, signal) {
  return await (await send(path, { headers: { Accept: JSON_TYPE }, signal })).json();
}

/** Outputs of a request to /attend, or of a step of a session: {tensors, layer, timing}; tensors are {shape, data} by name, data is Float32Array. */
export async function attend(request, outputs, signal, path = "attend") {
  const body = typeof request === "string" ? request : { ...request, outputs, reply: { datatype: "FP32" } };
  const response = await post(path, body, { accept: TENSORS, signal });
  const { tensors, metadata } = readTensors(await response.arrayBuffer());
  return { tensors, layer: JSON.parse(metadata.reply).layer, timing: response.headers.get("Server-Timing") ?? "" };
}

/** The tensors of these outputs, requested once for each request, an object, unless that fails. */
export async function cachedTensors(request, outputs) {
  if (!cached.has(request)) cached.set(request, {});
  const replies = cached.get(request);
  replies[outputs] ??= attend(request, outputs);
  try {
    return (await replies[outputs]).tensors;
  } catch (error) {
    delete replies[outputs];
    throw error;
  }
}

/** safetensors: eight bytes of length, a JSON header, the tensors. Only F32 tensors are returned, as views of the buffer. */
function readTensors(buffer) {
  const size = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, size)));
  const { __metadata__: metadata = {}, ...entries } = header;
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets: [begin, end] }] of Object.entries(entries)) {
    if (dtype === "F32") tensors[name] = { shape, data: new Float32Array(buffer, 8 + size + begin, (end - begin) / 4) };
  }
  return { tensors, metadata };
}

async function send(path, options) {
  if (/[^\x20-\x7e]/.test(apiKey)) throw new Refusal(401, "unknown key"); // not allowed in a header
  const headers = { ...options.headers, ...(apiKey && { Authorization: `Bearer ${apiKey}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, "The service does not answer. Is it still running?");
  }
  if (response.ok) return response;
  const document = await response.json().catch(() => ({}));
  const problems = (document.errors ?? []).map(({ at, expected, got }) => ({ at, text: `Expected ${expected}, got ${got}` }));
  const wait = response.headers.get("Retry-After");
  const detail = document.detail || document.title || `status ${response.status}`;
  throw new Refusal(response.status, detail + (wait ? `; try again in ${wait} s` : ""), problems);
}
