// What people take with them: the request as text for the clipboard, a picture as a file.

import { hasKey } from "./access.js";
import { KEY, written } from "./request.js";
import { post } from "./wire.js";

const WORDS = { curl: "curl command", python: "Python program", json: "JSON body" };

/** Puts the request on the clipboard, and into `box` for those whose browser does not let a page do that; gives what to tell. */
export async function copy(kind, request, box) {
  const text = written(kind, request, new URL(".", location.href).href, hasKey());
  box.value = text;
  box.hidden = false;
  box.setAttribute("aria-label", `${WORDS[kind]}`);
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    box.select();
    if (!document.execCommand("copy")) return `The ${WORDS[kind]} is below: copy it from there`;
  }
  return `Copied the ${WORDS[kind]}${hasKey() && kind !== "json" ? `, which takes the key from ${KEY}` : ""}`;
}

/** Kind and heads of a picture: `kind` as chosen, "shown" for the head (or "mean") that is enlarged, of the heads that are on. */
export function figureOf(kind, shown, chosen) {
  if (kind === "shown" && shown !== "mean") return { kind: "head", heads: [shown] };
  const named = kind === "shown" ? "mean" : kind;
  return named === "concatenation" || !chosen.length ? { kind: named } : { kind: named, heads: chosen };
}

/** Asks the service for a picture and hands it to the browser as a file. Throws Refusal. */
export async function download(request, figure, name) {
  const response = await post("attend/figure", { ...request, figure }, { accept: "*/*" });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await response.blob());
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
