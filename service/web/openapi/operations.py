"""Parts of the OpenAPI descriptions of routes: request bodies with their examples, and responses. A test posts each example."""

import math
from collections.abc import Mapping
from typing import Any

from service.wire.negotiation import JSON, PROBLEM_JSON, SAFETENSORS

BINARY = {"type": "string", "format": "binary"}
CALL_ERRORS = (400, 404, 406, 409, 413, 415, 422, 429, 500, 503, 504, 507)  # of an endpoint that computes

PUT_LAYER_EXAMPLE = {"spec": {"d_model": 4, "num_heads": 2, "seed": 7}}
ATTEND_EXAMPLE = {
    "layer": "tiny",
    "query": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]],
    "causal": True,
    "reply": {"decimals": 3},
}
# Four rows for the layer `default`, which every new server has
ROWS_EXAMPLE = {"query": [[round(math.sin((row + 1) * (column + 1) / 9), 2) for column in range(64)] for row in range(4)], "causal": True}
TOKENS_EXAMPLE = {"tokens": {"query": ["the", "cat", "saw", "the"]}}
DEFAULT_LAYER_EXAMPLE = {**ROWS_EXAMPLE, "reply": {"decimals": 3}}
FIGURE_EXAMPLE = {**ROWS_EXAMPLE, **TOKENS_EXAMPLE, "figure": {"kind": "heads", "format": "svg"}}
METRICS_EXAMPLE = ["entropy", "confidence", "strongest_links", "previous_token_score", "zero_ablation"]
ANALYSIS_EXAMPLE = {**ROWS_EXAMPLE, **TOKENS_EXAMPLE, "metrics": METRICS_EXAMPLE, "reply": {"decimals": 3}}
PLAN_EXAMPLE = {"query": {"shape": [2, 1000, 64]}, "causal": True, "outputs": ["output"]}
INFER_EXAMPLE = {
    "inputs": [{"name": "query", "shape": [1, 3, 4], "datatype": "FP32", "data": [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0]}],
    "parameters": {"causal": True, "reply": '{"decimals": 3}'},
}
LOAD_EXAMPLE = {"parameters": {"config": '{"d_model": 4, "num_heads": 2, "seed": 7}'}}
WORDS_EXAMPLE = {"text": "The cat sat on the mat", "layer": "default"}


def request_body_doc(model: str, *examples: tuple[Any, str], binary: bool = False, required: bool = True) -> dict[str, Any]:
    """The request body of a route that reads the body itself. An example is a body and its summary."""
    named = {f"example{i}": {"summary": summary, "value": value} for i, (value, summary) in enumerate(examples, 1)}
    content: dict[str, Any] = {JSON: {"schema": schema(model), "examples": named}}
    if binary:
        content[SAFETENSORS] = {"schema": BINARY}
    return {"requestBody": {"required": required, "content": content}}


def schema(model: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model}"}


def error_responses(
    *statuses: int, model: str = "ProblemDocument", media_type: str = PROBLEM_JSON, meaning: Mapping[int, str] = {}
) -> dict[int | str, dict[str, Any]]:
    """The refusals of a route. `meaning` replaces the descriptions of some statuses."""
    meanings = {
        400: "The body is not valid JSON, or a key is repeated.",
        401: "An API key is required.",
        403: "This server does not allow it.",
        404: "No such layer.",
        406: "No supported media type is accepted.",
        409: "The layers cannot be changed that way here, or the layer is unloaded.",
        413: "Too large: bytes, depth, parameters, or predicted memory.",
        415: "An unsupported media type.",
        422: "Well-formed, but it breaks the contract or does not fit the layer.",
        429: "The queue is full; see Retry-After.",
        500: "Server error.",
        503: "Not ready yet.",
        504: "The deadline of X-Request-Timeout passed.",
        507: "Not enough memory, or no disk space for a layer.",
        **meaning,
    }
    content = {media_type: {"schema": schema(model)}}
    return {status: {"description": meanings[status], "content": content} for status in statuses}
