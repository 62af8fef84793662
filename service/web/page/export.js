// Export: the request as text in the clipboard, a figure as a file.

import { key } from "./access.js";
import { make } from "./dom.js";
import { KEY, requestAsText } from "./snippets.js";
import { post } from "./wire.js";

const WORDS = { curl: "curl command", python: "Python program", json: "JSON body", link: "link" };

/** Copies the request, or the address of the page, to the clipboard and into `box`; returns a message. `texts`: see snippets.js. */
export async function copyRequest(kind, request, texts, box) {
  const text = kind === "link" ? location.href : requestAsText(kind, request, texts, new URL(".", location.href).href, Boolean(key));
  box.value = text;
  box.hidden = false;
  box.ariaLabel = WORDS[kind];
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    box.select();
    if (!document.execCommand("copy")) return `The ${WORDS[kind]} is below: copy it from there`;
  }
  const needs = [kind === "curl" && texts && "needs jq", key && (kind === "curl" || kind === "python") && `takes the key from ${KEY}`].filter(Boolean);
  return `Copied the ${WORDS[kind]}${needs.length ? `, which ${needs.join(" and ")}` : ""}`;
}

/** Kind and heads of a figure; the kind "shown" is the enlarged head or the mean. */
export function figureOf(kind, shown, chosen) {
  if (kind === "shown" && shown !== "mean") return { kind: "head", heads: [shown] };
  const named = kind === "shown" ? "mean" : kind;
  return named === "concatenation" || !chosen.length ? { kind: named } : { kind: named, heads: chosen };
}

/** Downloads a figure from the service. Throws Refusal. */
export async function downloadFigure(request, figure, name) {
  const response = await post("attend/figure", { ...request, figure }, { accept: "*/*" });
  const link = make("a", { href: URL.createObjectURL(await response.blob()), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
