// A request as text to paste: a curl command, a Python program, or JSON. Of a sentence, command and program begin with its text, not its vectors.

export const KEY = "ATTEND_API_KEY"; // environment variable with the API key, the same as for the commands

/**
 * The request as "curl", "python" or "json". `texts`: bodies for /words, by input of the layer, if the request is made of sentences. `keyed`:
 * whether the server needs an API key.
 */
export function requestAsText(kind, request, texts, url, keyed) {
  if (kind === "json") return JSON.stringify(request);
  if (kind === "curl") return texts ? curlOfTexts(request, texts, url, keyed) : curlOfRequest(request, url, keyed);
  const lines = texts ? attendTexts(request, texts) : attendRequest(request);
  const imports = [...(texts ? [] : ["import json"]), ...(keyed ? ["import os"] : [])];
  return [
    ...imports,
    ...(imports.length ? [""] : []),
    "from service.client import Client",
    "",
    `with Client(${literal(url)}${keyed ? `, api_key=os.environ["${KEY}"]` : ""}) as client:`,
    ...lines.map((line) => `    ${line}`),
    "print(result.attention_weights.shape)",
    "",
  ].join("\n");
}

function curlOfRequest(request, url, keyed) {
  return `${post(url, "attend", keyed)} --data-binary @- <<'REQUEST'\n${JSON.stringify(request)}\nREQUEST\n`;
}

function curlOfTexts(request, texts, url, keyed) {
  const { query, key, value, tokens, ...rest } = request;
  const parts = Object.keys(texts);
  const words = parts.map((part) => `${post(url, "words", keyed)} -d '${quotable({ ...texts[part], part: part === "query" ? undefined : part })}'`);
  const vectors = parts.map((part, i) => `${part}: .[${i}].vectors`);
  const labels = parts.flatMap((part, i) => (part === "value" ? [] : [`${part}: .[${i}].tokens`]));
  if (tokens.omit) labels.push(`omit: "${tokens.omit}"`);
  return [
    words.length === 1 ? `${words[0]} |` : `{ ${words.join("\n  ")}; } |`,
    `  jq -s '${quotable(rest)} + {${vectors.join(", ")}, tokens: {${labels.join(", ")}}}' |`,
    `  ${post(url, "attend", keyed)} --data-binary @-`,
    "",
  ].join("\n");
}

function post(url, path, keyed) {
  return `curl -sS ${url}${path}${keyed ? ` -H "Authorization: Bearer $${KEY}"` : ""} -H 'Content-Type: application/json'`;
}

function attendRequest(request) {
  return [`request = json.loads(r'''${quotable(request)}''')`, "result = client.attend(**request)"];
}

function attendTexts(request, texts) {
  const { query, key, value, tokens, ...rest } = request;
  const [, ...others] = Object.keys(texts);
  const read = ({ layer, text, part }) => `${part} = client.words(${literal(text)}, layer=${literal(layer)}${part === "query" ? "" : `, part="${part}"`})`;
  const labels = ["query", ...others.filter((part) => part === "key")].map((part) => `"${part}": ${part}.tokens`);
  if (tokens.omit) labels.push(`"omit": "${tokens.omit}"`);
  const fields = [
    "query.vectors",
    ...others.map((part) => `${part}=${part}.vectors`),
    `tokens={${labels.join(", ")}}`,
    ...Object.entries(rest).map(([name, field]) => `${name}=${literal(field)}`),
  ];
  return [...Object.values(texts).map(read), `result = client.attend(${fields.join(", ")})`];
}

/** A JSON value in Python. */
function literal(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([name, member]) => `${JSON.stringify(name)}: ${literal(member)}`).join(", ")}}`;
}

/** JSON without single quotes, for text between them. */
function quotable(document) {
  return JSON.stringify(document).replaceAll("'", "\\u0027");
}
