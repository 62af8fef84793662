"""A check for schemathesis: data that the OpenAPI document calls good is refused only for what no JSON schema can tell.

Each reason is written as what the refusal expected, in full: a refusal in other words fails the check, and then either the document or the
server is to be mended.
"""

import json
import re
from typing import Any

import schemathesis

REASONS = {
    "the layer is not there": ["a loaded layer .*"],
    "tensors must fit each other and the layer": [
        r"shape .*",
        r"rank \d, as the query has",
        r"\d+ (values per (query|key|value)|factors|heads \(or 1\)) for layer \".*\"",
        r"\d+ values, as in the rows before",
        r"\d+ values for shape .*, in one list or nested to it",
        r"\d+ bytes for shape .* of \w+",
        r"base64",
        r"fewer than 2\^48 elements",
        r"at most \d+, the number of (keys|queries)",
        r'one integer or "end"|\d+ integers.*|a single number(, or shape .*)?|\d+ lengths',
        r"one list, or one per batch item|\d+ (tokens, one per row of the (query|key)|lists?.*)",
        r"at least one query and one key to draw",
        r"a token of the queries or keys|at least one (query|key)( of item \d+)? that is not omitted",
        r"an item below \d+|a head below \d+ for layer .*|a (query|key) below \d+.*",
    ],
    "numbers must be held by their datatype": [
        r"a whole number from -?\d+ to \d+ for U?INT\d+",
        r"a (number that is finite in|finite) \w+",
    ],
    "what goes only together, or not together": [
        r"a key in addition to the value|a key, .*",
        r"positions (in addition to key_positions|alone, since the key is the query|from -\d+ to \d+)",
        r"the positions of the (keys|queries)\b.*",
        r"an offset .*",
        r"query_(segments|lengths) and key_(segments|lengths)|(key|key_lengths), since query_lengths and key(_lengths)? are given",
        r"no \w+ beside query_lengths|at least one sequence|lengths with the sum .*|\d+ lengths, as query_lengths has",
        r"segments, which keep sequences in one query apart here",
        r"(none|an output other than \w+) for layer .*",
        r"data or base64 in addition to the shape",  # a shape alone is for the plan
        r"attention_weights among the outputs",
        r"a gradient of the output, since \w+_gradient is among the outputs",
        r"query_gradient, key_gradient or value_gradient among the outputs",
        r"tokens of queries and keys, since \w+ is among the metrics",
        r"one head for a picture of kind head|linear for numbers of either sign|null, since the concatenation is of all heads",
        r"numbers? in cells .*|room for .*",
        r"a body of type application/vnd.safetensors with this query parameter",
        r"at most one of .*|either .* or .*",
    ],
    "a spec's fields must agree, and weights be those of the spec": [
        r"a divisor of (d_model|num_heads) \d+.*",
        r"an even number of at most head_dim \d+",
        r"more than \d+, the number of distances with a bucket of their own",
        r"less than (high_freq_factor|head_dim) .*",
        r"\d+, (the key_dim, )?(since|as) .*",
        r"0, or a number from 1e-30 to 1",
        r"a number other than 0, or null for the default",
        r"each axis from 0 to \d+",
        r"nothing, since the weights are given and none is drawn",
        r"the names of one layout: .*",
        r"false, since .*|true or false for all, as torch.nn.MultiheadAttention has",
        r"a tensor of shape \[.*\]|(one of (key|key_norm|output|relative_bias|sinks)\b.*|none)",
        r"a factor whose weights are finite in \w+",
    ],
    "what a word is, no schema says": [r"a sentence with at least one word"],
    "limits of this server": [r"at most \d+ .*(\(max_\w+\)|words|word pieces)"],
    "under /v2: what the path, another member or a text inside says": [
        r'"[^"]*", as in the path',
        r"JSON",
        r"an object( such as .*)?|a list|an integer|a number|true or false|no field of that name",  # inside such a text
        r"either data or binary_data_size",
        r"\d+ bytes of tensors after the JSON|\d+ bytes after the JSON .*",
        r"an input called query",
        r"each (input|output) once",
        r"one of U?INT8 .*",  # BOOL is for masks
        r"select.top_k among the parameters, which .* requires",
        r"an output in JSON, whose numbers are text to round",
    ],
}
WHOLE = re.compile(r"-?\d+\.0+|-?[\d.]+e\+?\d+", re.IGNORECASE)  # JSON schema calls 3.0 an integer
V2 = re.compile(r"expected (?P<expected>.*), got (?P<got>.*?)(, at (?P<at>/.*))?", re.DOTALL)


def complaints(document: dict[str, Any]) -> list[dict[str, str]]:
    """What a refusal is about, natively and under /v2."""
    if "error" in document:
        found = V2.fullmatch(document["error"])
        return [{name: text or "" for name, text in found.groupdict().items()}] if found else []
    return list(document["errors"])


def is_told_by_no_schema(complaint: dict[str, str]) -> bool:
    if WHOLE.fullmatch(complaint["got"]):
        return True
    return any(re.fullmatch(words, complaint["expected"], re.DOTALL) for reasons in REASONS.values() for words in reasons)


@schemathesis.check
def good_data_is_taken(ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case) -> None:
    if case.meta is None or not case.meta.generation.mode.is_positive or response.status_code not in (400, 404, 413, 422):
        return
    found = complaints(json.loads(response.content))
    odd = [complaint for complaint in found if not is_told_by_no_schema(complaint)]
    assert found and not odd, f"what the document calls good is refused: {odd or response.text}"
