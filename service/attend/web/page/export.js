// Export: the request as text in the clipboard (a curl command, a Python program, JSON), a figure as a file. If the request is made from
// sentences, command and program have their text, not their vectors.

import { make } from "./dom.js";
import { apiKey, post } from "./wire.js";

const KEY = "ATTEND_API_KEY"; // environment variable with the API key, the same as for the commands
const SERVICE = new URL(".", location.href).href;
const TITLES = { curl: "curl command", python: "Python program", json: "JSON body", link: "link" };

/** Copies the request, or the address of the page, to the clipboard and into `box`; returns a message. `texts`: see requestAsText. */
export async function copyRequest(kind, request, texts, box) {
  const text = kind === "link" ? location.href : requestAsText(kind, request, texts);
  box.value = text;
  box.hidden = false;
  box.ariaLabel = TITLES[kind];
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    box.select();
    if (!document.execCommand("copy")) return `The ${TITLES[kind]} is below: copy it from there`;
  }
  const needs = [kind === "curl" && texts && "needs jq", apiKey && (kind === "curl" || kind === "python") && `takes the key from ${KEY}`].filter(Boolean);
  return `Copied the ${TITLES[kind]}${needs.length ? `, which ${needs.join(" and ")}` : ""}`;
}

/** Kind and heads of a figure; the kind "shown" is the enlarged head or the mean. */
export function figureOf(kind, shown, chosen) {
  if (kind === "shown" && shown !== "mean") return { kind: "head", heads: [shown] };
  const named = kind === "shown" ? "mean" : kind;
  return named === "concatenation" || !chosen.length ? { kind: named } : { kind: named, heads: chosen };
}

/** The fields of a figure of a kind for a scale of the page. Pictures have no scale for each row: each head has its own then. */
export function scaleOf(scale, kind) {
  if (!["heads", "head", "mean", "std"].includes(kind) || scale === "all") return {};
  if (scale === "one") return { maximum: 1 };
  return { scale_per_head: kind === "heads", ...(scale === "log" && { scale: "log" }) };
}

/** Downloads a figure from the service. Throws Refusal. */
export async function downloadFigure(request, figure, name) {
  const response = await post("attend/figure", { ...request, figure }, { accept: "*/*" });
  const link = make("a", { href: URL.createObjectURL(await response.blob()), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** The request as "curl", "python" or "json". `texts`: bodies for /words, by input of the layer, if the request is made of sentences. */
function requestAsText(kind, request, texts) {
  if (kind === "json") return JSON.stringify(request);
  if (kind === "curl") return texts ? curlOfTexts(request, texts) : `${curl("attend")} --data-binary @- <<'REQUEST'\n${JSON.stringify(request)}\nREQUEST\n`;
  const lines = texts ? attendTexts(request, texts) : [`request = json.loads(r'''${quotable(request)}''')`, "result = client.attend(**request)"];
  const imports = [...(texts ? [] : ["import json"]), ...(apiKey ? ["import os"] : [])];
  return [
    ...imports,
    ...(imports.length ? [""] : []),
    "from attend.client import Client",
    "",
    `with Client(${literal(SERVICE)}${apiKey ? `, api_key=os.environ["${KEY}"]` : ""}) as client:`,
    ...lines.map((line) => `    ${line}`),
    "print(result.attention_weights.shape)",
    "",
  ].join("\n");
}

/** A command that reads the vectors of the texts, puts them into the request with jq, and sends it. */
function curlOfTexts(request, texts) {
  const { query, key, value, tokens, ...rest } = request;
  const parts = Object.keys(texts);
  const words = parts.map((part) => `${curl("words")} -d '${quotable({ ...texts[part], part: part === "query" ? undefined : part })}'`);
  const vectors = parts.map((part, i) => `${part}: .[${i}].vectors`);
  const labels = parts.flatMap((part, i) => (part === "value" ? [] : [`${part}: .[${i}].tokens`]));
  if (tokens.omit) labels.push(`omit: "${tokens.omit}"`);
  return [
    words.length === 1 ? `${words[0]} |` : `{ ${words.join("\n  ")}; } |`,
    `  jq -s '${quotable(rest)} + {${vectors.join(", ")}, tokens: {${labels.join(", ")}}}' |`,
    `  ${curl("attend")} --data-binary @-`,
    "",
  ].join("\n");
}

function curl(path) {
  return `curl -sS ${SERVICE}${path}${apiKey ? ` -H "Authorization: Bearer $${KEY}"` : ""} -H 'Content-Type: application/json'`;
}

/** The lines of Python that read the vectors of the texts and attend. */
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
