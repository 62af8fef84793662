"""Malformed requests over HTTP, as one table: each is refused with its status and pointer, and the server then answers a valid request."""

import base64
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest

from support.waiting import until

TITLES = {
    400: "malformed body",
    404: "no such layer",
    405: "method not allowed",
    406: "not acceptable",
    413: "too large",
    415: "unsupported media type",
    422: "invalid request",
}
QUERY = [[[1, 2, 3, 4], [5, 6, 7, 8], [9, 1, 2, 3]], [[4, 3, 2, 1], [8, 7, 6, 5], [3, 2, 1, 9]]]  # [b 2, q 3, 4]
KEY = np.arange(30).reshape(2, 5, 3).tolist()  # [b 2, k 5, 3]
VALUE = np.arange(50).reshape(2, 5, 5).tolist()  # [b 2, k 5, 5]
LIMIT = 4 * 1024 * 1024  # bytes of a body that the fixture `server` accepts


@dataclass(frozen=True)
class Bad:
    """A request and its refusal: the status, the exact `at`, fragments of `expected` and `got`. `at` is None: no problems."""

    name: str
    status: int
    at: str | None
    expected: str
    got: str
    body: bytes = b""
    method: str = "POST"
    path: str = "/attend"
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "application/json"})


def tiny(**fields: Any) -> bytes:
    """A body for the layer `tiny` (d_model 4, 2 heads) with b 2, q = k = 3; valid except for `fields`."""
    return json.dumps({"layer": "tiny", "query": QUERY, **fields}).encode()


def cross(**fields: Any) -> bytes:
    """A body for the layer `cross` (key_dim 3, value_dim 5) with b 2, q 3, k 5; valid except for `fields`."""
    return json.dumps({"layer": "cross", "query": QUERY, "key": KEY, "value": VALUE, **fields}).encode()


def loose(**fields: Any) -> bytes:
    """An unbatched body for the layer `tiny` with q = k = 3; valid except for `fields`."""
    return json.dumps({"layer": "tiny", "query": QUERY[0], **fields}).encode()


def raw(query: str, more: str = "") -> bytes:
    """A body for the layer `tiny` whose query is this text."""
    return f'{{"layer": "tiny", "query": {query}{more}}}'.encode()


def packed(array: Any, dtype: str) -> str:
    return base64.b64encode(np.asarray(array, dtype).tobytes()).decode()


def coded(shape: list[Any], datatype: Any, text: Any) -> bytes:
    return tiny(query={"shape": shape, "datatype": datatype, "base64": text})


def flat(shape: Any, data: Any, **more: Any) -> bytes:
    return tiny(query={"shape": shape, "data": data, **more})


def zeros(*shape: int) -> Any:
    return np.zeros(shape, int).tolist()


def spec(**fields: Any) -> bytes:
    return json.dumps({"spec": {"d_model": 4, "num_heads": 2, **fields}}).encode()


def weights(**changes: Any) -> bytes:
    """A valid PUT of weights for d_model 2 without biases, except for `changes` (`query` is `query.weight`; None removes it)."""
    given = {f"{name}.weight": [[1, 0], [0, 1]] for name in ("query", "key", "value", "output")}
    given |= {f"{name}.weight": value for name, value in changes.items()}
    given = {name: value for name, value in given.items() if value is not None}
    return json.dumps({"spec": {"d_model": 2, "num_heads": 1, "bias": False}, "weights": given}).encode()


NUMPY_WEIGHTS = re.sub(rb'"(.)\w+\.weight"', rb'"W_\1"', weights())  # W_q, W_k, W_v, W_o


def put(name: str, at: str | None, expected: str, got: str, body: bytes, status: int = 422, path: str = "/layers/bad") -> Bad:
    return Bad(f"put-{name}", status, at, expected, got, body, "PUT", path)


ROWS = "[[1, 2, 3, 4], [5, 6, 7, 8]]"
NUMBER = "1" + "0" * 400
WORDS = ["a", "b", "c"]

SYNTAX = [
    Bad("empty", 400, "", "JSON", "end of the body"),
    Bad("not-json", 400, "", "JSON", "line 1 column 1", b"hello"),
    Bad("html", 400, "", "JSON", "'<'", b"<html></html>"),
    Bad("form-fields", 400, "", "JSON", "'q'", b"query=1&key=2"),
    Bad("keys-of-minus-infinity", 400, "", "JSON", "line 1", b'{"query": ' + b'["-inf":' * 32768),  # scanned once, not once per key
    Bad("truncated", 400, "", "JSON", "end of the body", b'{"layer": "tiny", "query": [[1, 2'),
    Bad("truncated-string", 400, "", "JSON", "", b'{"layer": "ti'),
    Bad("truncated-number", 400, "", "JSON", "", b'{"query": [[1, 2e'),
    Bad("trailing-garbage", 400, "", "JSON", "'x'", raw(ROWS) + b" x"),
    Bad("two-documents", 400, "", "JSON", "", raw(ROWS) + raw(ROWS)),
    Bad("trailing-comma", 400, "", "JSON", "", raw("[[1, 2, 3, 4,]]")),
    Bad("missing-comma", 400, "", "JSON", "", raw("[[1 2, 3, 4]]")),
    Bad("leading-zero", 400, "", "JSON", "", raw("[[01, 2, 3, 4]]")),
    Bad("plus-sign", 400, "", "JSON", "", raw("[[+1, 2, 3, 4]]")),
    Bad("bare-point", 400, "", "JSON", "", raw("[[.5, 2, 3, 4]]")),
    Bad("hexadecimal", 400, "", "JSON", "", raw("[[0x1, 2, 3, 4]]")),
    Bad("single-quotes", 400, "", "JSON", "", b"{'layer': 'tiny'}"),
    Bad("comment", 400, "", "JSON", "", b'{"layer": "tiny" /* the small one */}'),
    Bad("bare-key", 400, "", "JSON", "", b'{layer: "tiny"}'),
    Bad("line-break-in-string", 400, "", "JSON", "", b'{"layer": "ti\nny"}'),
    Bad("bad-escape", 400, "", "JSON", "", rb'{"layer": "ti\xny"}'),
    Bad("null-byte", 400, "", "JSON", "", raw(ROWS) + b"\0"),
    Bad("invalid-utf8", 400, "", "UTF-8", "offset 11", b'{"layer": "\xff"}'),
    Bad("overlong-utf8", 400, "", "UTF-8", "offset 11", b'{"layer": "\xc0\xaf"}'),
    Bad("utf16", 400, "", "JSON", "", raw(ROWS).decode().encode("utf-16")),
    Bad("nan", 400, "/query/0/1", "a JSON number", "NaN", raw("[[1, NaN, 3, 4]]")),
    Bad("infinity", 400, "/query/1/0", "a JSON number", "Infinity", raw("[[1, 2, 3, 4], [Infinity, 2, 3, 4]]")),
    Bad("minus-infinity", 400, "/bias/0/0", "a JSON number", "-Infinity", raw(ROWS, ', "bias": [[-Infinity, 0], [0, 0]]')),
    Bad("nan-scalar", 400, "/scale", "a JSON number", "NaN", raw(ROWS, ', "scale": NaN')),
    Bad("nan-in-large-body", 400, "/query/9999/3", "a JSON number", "NaN", raw("[" + "[1, 2, 3, 4], " * 9999 + "[1, 2, 3, NaN]]")),
    Bad("1e999", 422, "/query/0/2", "a finite number", "", raw("[[1, 2, 1e999, 4]]")),
    Bad("minus-1e999", 422, "/bias/0/0", "a finite number", "", raw(ROWS, ', "bias": [[-1e999, 0], [0, 0]]')),
    Bad("1e999-scalar", 422, "/scale", "a finite number", "", raw(ROWS, ', "scale": 1e999')),
    Bad("400-digits", 422, "/query/0/2", "a finite number", "", raw(f"[[1, 2, {NUMBER}, 4]]")),
    Bad("400-digits-scalar", 422, "/scale", "number", "", raw(ROWS, f', "scale": {NUMBER}')),
    Bad("400-digits-length", 422, "/valid_lens", "", "", raw(ROWS, f', "valid_lens": {NUMBER}')),
    Bad("5000-digits", 422, "/query/0/2", "a finite number", "", raw(f"[[1, 2, {NUMBER * 13}, 4]]")),
    Bad("twice", 400, "/causal", "each key once", '"causal" twice', raw(ROWS, ', "causal": true, "causal": false')),
    Bad("twice-tensor", 400, "/query", "each key once", '"query" twice', raw(ROWS, f', "query": {ROWS}')),
    Bad("twice-by-escape", 400, "/query", "each key once", '"query" twice', raw(ROWS, rf', "qu\u0065ry": {ROWS}')),
    Bad("twice-nested", 400, "/reply/form", "each key once", "twice", raw(ROWS, ', "reply": {"form": "flat", "form": "nested"}')),
    Bad("twice-in-form", 400, "/query/shape", "each key once", "twice", raw('{"shape": [1, 4], "data": [1, 2, 3, 4], "shape": [1, 4]}')),
    Bad("twice-beside-nan", 400, "/layer", "each key once", "twice", b'{"layer": "a", "layer": "b", "scale": NaN}'),
    Bad("list", 422, "", "a JSON object", "a list", b"[1, 2]"),
    Bad("number", 422, "", "a JSON object", "3", b"3"),
    Bad("string", 422, "", "a JSON object", '"tiny"', b'"tiny"'),
    Bad("null", 422, "", "a JSON object", "null", b"null"),
    Bad("null-byte-in-key", 422, "/\0", "no field of that name", "a field", raw(ROWS, r', "\u0000": 1')),
    Bad("null-byte-in-key-of-form", 422, "/query/shape\0", "one of shape", "", raw(r'{"shape\u0000": [1, 4]}')),
    Bad("lone-surrogate", 422, "/layer", "string", "", rb'{"layer": "\ud800", "query": [[1, 2, 3, 4]]}'),
    Bad("too-deep", 413, "/query", "64 deep", "deeper", raw("[" * 65 + "1" + "]" * 65)),
    Bad("too-deep-unknown-field", 413, "/extra", "64 deep", "deeper", raw(ROWS, f', "extra": {"[" * 100 + "]" * 100}')),
    Bad("too-deep-objects", 413, "/reply", "64 deep", "deeper", raw(ROWS, ', "reply": ' + '{"form": ' * 80 + "1" + "}" * 80)),
    Bad("far-too-deep", 413, "/query", "64 deep", "deeper", raw("[" * 100_000 + "1" + "]" * 100_000)),
    Bad("too-deep-and-truncated", 413, "", "", "deep", b'{"query": ' + b"[" * 100_000),
]

TENSORS = [
    Bad("ragged-rows", 422, "/query/1", "4 values", "3", raw("[[1, 2, 3, 4], [1, 2, 3]]")),
    Bad("ragged-last-row-longer", 422, "/query/2", "4 values", "5", raw("[[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4, 5]]")),
    Bad("ragged-batch", 422, "/query/1", "2 values", "1", raw(f"[{ROWS}, [[1, 2, 3, 4]]]")),
    Bad("ragged-in-batch", 422, "/query/1/0", "4 values", "3", raw(f"[{ROWS}, [[1, 2, 3], [1, 2, 3, 4]]]")),
    Bad("ragged-same-count", 422, "/query/1/0", "4 values", "3", raw(f"[{ROWS}, [[1, 2, 3], [1, 2, 3, 4, 5]]]")),
    Bad(
        "ragged-mask", 422, "/attend_mask/1/1/2", "3 values", "2", tiny(attend_mask=[zeros(2, 3, 3), [zeros(3, 3), [*zeros(2, 3), [0, 0]]]])
    ),
    Bad("ragged-empty-row", 422, "/query/1", "4 values", "0", raw("[[1, 2, 3, 4], []]")),
    Bad("list-among-numbers", 422, "/query/1/0", "a number", "a list of 1", raw("[[1, 2], [[3], 4]]")),
    Bad("list-of-list-among-numbers", 422, "/query/0/1/3", "a number", "a list", raw("[[[1, 2, 3, 4], [5, 6, 7, [[8]]]]]")),
    Bad("list-first-elsewhere", 422, "/query/0/1", "a list of 1", "2", raw("[[[1], 2], [[3], [4]]]")),
    Bad("list-in-mask", 422, "/attend_mask/2/2", "", "a list of 1", tiny(attend_mask=[[1, 1, 1], [1, 1, 1], [1, 1, [1]]])),
    Bad("number-among-lists", 422, "/query/1", "a list of 4", "5", raw("[[1, 2, 3, 4], 5]")),
    Bad("list-among-numbers-large", 422, "/query/9999/3", "a number", "a list", raw("[" + "[1, 2, 3, 4], " * 9999 + "[1, 2, 3, [4]]]")),
    Bad("list-beside-brackets-in-words", 422, "/query/0/3", "a number", "a list", raw("[[1, 2, 3, [4]]]", ', "tokens": {"query": ["]"]}')),
    Bad("list-beside-escapes", 422, "/query/0/3", "a number", "a list", raw("[[1, 2, 3, [4]]]", r', "tokens": {"query": ["\u005b\\"]}')),
    Bad("string-among-numbers", 422, "/query/0/1", "a number", '"2"', raw('[[1, "2", 3, 4]]')),
    Bad("nan-string", 422, "/query/0/0", "a number", '"nan"', raw('[["nan", 2, 3, 4]]')),
    Bad("minus-inf-in-query", 422, "/query/0/0", "a number", '"-inf"', raw('[["-inf", 2, 3, 4]]')),
    Bad("null-among-numbers", 422, "/query/0/3", "a number", "null", raw("[[1, 2, 3, null]]")),
    Bad("true-among-numbers", 422, "/query/0/0", "a number", "true", raw("[[true, 2, 3, 4]]")),
    Bad("false-in-bias", 422, "/bias/1/2", 'a number or "-inf"', "false", tiny(bias=[[0, 0, 0], [0, 0, False], [0, 0, 0]])),
    Bad("object-among-numbers", 422, "/query/0/2", "a number", "an object", raw('[[1, 2, {"a": 3}, 4]]')),
    Bad("string-row", 422, "/query/1", "a list of 4", '"row"', raw('[[1, 2, 3, 4], "row"]')),
    Bad("tensor-is-string", 422, "/query", "a tensor", "", raw('"abc"')),
    Bad("tensor-is-true", 422, "/query", "a tensor", "", raw("true")),
    Bad("tensor-is-null", 422, "/query", "a tensor", "null", raw("null")),
    Bad("tensor-missing", 422, "/query", "this required field", "nothing", b'{"layer": "tiny"}'),
    Bad("rank-0", 422, "/query", "rank 2 or 3", "shape []", raw("3")),
    Bad("rank-1", 422, "/query", "rank 2 or 3", "shape [4]", raw("[1, 2, 3, 4]")),
    Bad("rank-4", 422, "/query", "rank 2 or 3", "shape [1, 1, 1, 4]", raw("[[[[1, 2, 3, 4]]]]")),
    Bad("rank-5", 422, "/query", "at most 4", "5", raw("[[[[[1, 2, 3, 4]]]]]")),
    Bad("zero-length", 422, "/query", "shape", "empty", raw("[]")),
    Bad("zero-length-nested", 422, "/query", "shape", "empty", raw("[[], []]")),
    Bad("beyond-float32", 422, "/query/0/1/2", "a finite float32", "1e+39", tiny(query=[[[1, 2, 3, 4], [1, 2, 1e39, 4]]])),
    Bad("beyond-float16", 422, "/query/0/2", "a finite float16", "65520", raw("[[1, 2, 65520, 4]]").replace(b"tiny", b"half")),
    Bad("bias-beyond-float32", 422, "/bias/0/1", "a finite float32", "-1e+39", tiny(bias=[[0, -1e39, 0], [0, 0, 0], [0, 0, 0]])),
]

CODECS = [
    Bad("base64-characters", 422, "/query/base64", "base64", "", coded([1, 4], "FP32", "????")),
    Bad("base64-line-breaks", 422, "/query/base64", "base64", "", coded([1, 4], "FP32", packed([1, 2, 3, 4], "<f4")[:8] + "\n")),
    Bad("base64-padding", 422, "/query/base64", "base64", "", coded([1, 4], "FP32", packed([1, 2, 3, 4], "<f4").rstrip("="))),
    Bad("base64-padding-surplus", 422, "/query/base64", "base64", "", coded([1, 3], "FP32", packed([1, 2, 3], "<f4") + "=")),
    Bad("base64-padding-inside", 422, "/query/base64", "base64", "", coded([1, 4], "FP32", "AAA=AAAA")),
    Bad("base64-short", 422, "/query/base64", "16 bytes", "12", coded([1, 4], "FP32", packed([1, 2, 3], "<f4"))),
    Bad("base64-long", 422, "/query/base64", "16 bytes", "20", coded([1, 4], "FP32", packed([1, 2, 3, 4, 5], "<f4"))),
    Bad("base64-empty", 422, "/query/base64", "16 bytes", "0", coded([1, 4], "FP32", "")),
    Bad("base64-is-list", 422, "/query/base64", "a base64 string", "a list of 4", coded([1, 4], "FP32", [1, 2, 3, 4])),
    Bad("base64-is-null", 422, "/query/base64", "a base64 string", "null", coded([1, 4], "FP32", None)),
    Bad("base64-without-datatype", 422, "/query/datatype", "FP32", "null", tiny(query={"shape": [1, 4], "base64": "AAAA"})),
    Bad("base64-nan", 422, "/query/0/2", "a finite float32", "nan", coded([1, 4], "FP32", packed([1, 2, np.nan, 4], "<f4"))),
    Bad("base64-infinity", 422, "/query/0/3", "a finite float32", "inf", coded([1, 4], "FP32", packed([1, 2, 3, np.inf], "<f4"))),
    Bad(
        "base64-bool-2",
        422,
        "/attend_keys/base64",
        "BOOL",
        "",
        tiny(attend_keys={"shape": [2, 3], "datatype": "BOOL", "base64": "AAECAAAA"}),
    ),
    Bad("base64-bool-query", 422, "/query", "numbers", "bool", coded([1, 4], "BOOL", "AAAAAA==")),
    Bad(
        "base64-mask-2",
        422,
        "/attend_keys/0/2",
        "0, 1",
        "2",
        tiny(attend_keys={"shape": [2, 3], "datatype": "UINT8", "base64": "AAECAAAA"}),
    ),
    Bad(
        "base64-length-infinite",
        422,
        "/valid_lens/1",
        "",
        "inf",
        tiny(valid_lens={"shape": [2], "datatype": "FP32", "base64": packed([1, np.inf], "<f4")}),
    ),
    Bad(
        "base64-length-nan",
        422,
        "/valid_lens/0",
        "",
        "nan",
        tiny(valid_lens={"shape": [2], "datatype": "FP32", "base64": packed([np.nan, 1], "<f4")}),
    ),
    Bad(
        "base64-length-2^64",
        422,
        "/valid_lens/1",
        "",
        "",
        tiny(valid_lens={"shape": [2], "datatype": "UINT64", "base64": packed([1, 2**64 - 1], "<u8")}),
    ),
    Bad(
        "base64-bias-plus-infinity",
        422,
        "/bias/0/1",
        "a finite float32",
        "inf",
        tiny(bias={"shape": [1, 3], "datatype": "FP32", "base64": packed([0, np.inf, 0], "<f4")}),
    ),
    Bad("datatype-numpy", 422, "/query/datatype", "FP32", '"float32"', flat([1, 4], [1, 2, 3, 4], datatype="float32")),
    Bad("datatype-number", 422, "/query/datatype", "FP32", "32", flat([1, 4], [1, 2, 3, 4], datatype=32)),
    Bad("datatype-overflow", 422, "/query/data/2", "-128 to 127 for INT8", "300", flat([1, 4], [1, 2, 300, 4], datatype="INT8")),
    Bad("datatype-fraction", 422, "/query/data/2", "INT32", "3.5", flat([1, 4], [1, 2, 3.5, 4], datatype="INT32")),
    Bad("datatype-negative", 422, "/query/data/2", "UINT16", "-3", flat([1, 4], [1, 2, -3, 4], datatype="UINT16")),
    Bad("datatype-fp16-overflow", 422, "/query/data/2", "finite in FP16", "1000000", flat([1, 4], [1, 2, 1e6, 4], datatype="FP16")),
    Bad("data-short", 422, "/query/data", "8 values for shape [2, 4]", "7", flat([2, 4], [1, 2, 3, 4, 5, 6, 7])),
    Bad("data-long", 422, "/query/data", "4 values for shape [1, 4]", "5", flat([1, 4], [1, 2, 3, 4, 5])),
    Bad("data-empty", 422, "/query/data", "4 values", "0", flat([1, 4], [])),
    Bad("data-nested-otherwise", 422, "/query/data", "8 values for shape [2, 4]", "shape [4, 2]", flat([2, 4], zeros(4, 2))),
    Bad("data-ragged", 422, "/query/data/1", "4 values", "3", flat([2, 4], [[1, 2, 3, 4], [5, 6, 7]])),
    Bad("data-string", 422, "/query/data/1", "a number", '"2"', flat([1, 4], [1, "2", 3, 4])),
    Bad("data-list-inside", 422, "/query/data/3", "a number", "a list of 1", flat([1, 4], [1, 2, 3, [4]])),
    Bad("data-is-object", 422, "/query/data", "a list of numbers", "an object", flat([1, 4], {"a": 1})),
    Bad("data-is-null", 422, "/query", "data", "", flat([1, 4], None)),
    Bad("data-and-base64", 422, "/query", "either data or base64", "both", flat([1, 4], [1, 2, 3, 4], base64="AAAA", datatype="FP32")),
    Bad("shape-alone", 422, "/query", "data", "", tiny(query={"shape": [1, 3, 4]})),
    Bad("shape-alone-huge", 422, "/query", "data", "", tiny(query={"shape": [1, 10**9, 4]}, outputs=["log_sum_exp"])),
    Bad("mask-shape-alone", 422, "/attend_mask", "data", "", tiny(attend_mask={"shape": [3, 3]})),
    Bad("shape-missing", 422, "/query/shape", "a list of lengths", "nothing", tiny(query={"data": [1, 2, 3, 4]})),
    Bad("shape-number", 422, "/query/shape", "a list of lengths", "4", flat(4, [1, 2, 3, 4])),
    Bad("shape-negative", 422, "/query/shape/0", "a length from 0 to 2147483647", "-1", flat([-1, 4], [1, 2, 3, 4])),
    Bad("shape-fraction", 422, "/query/shape/1", "a length from 0 to 2147483647", "4.5", flat([1, 4.5], [1, 2, 3, 4])),
    Bad("shape-bool", 422, "/query/shape/0", "a length from 0 to 2147483647", "true", flat([True, 4], [1, 2, 3, 4])),
    Bad("shape-string", 422, "/query/shape/0", "a length from 0 to 2147483647", '"1"', flat(["1", 4], [1, 2, 3, 4])),
    Bad("shape-rank", 422, "/query/shape", "at most 4 axes", "5", flat([1, 1, 1, 1, 4], [1, 2, 3, 4])),
    Bad("shape-2^31", 422, "/query/shape/0", "a length from 0 to 2147483647", "2147483648", flat([2**31, 4], [1])),
    Bad("shape-2^64", 422, "/query/shape/0", "a length from 0 to 2147483647", "18446744073709551616", flat([2**64, 4], [1])),
    Bad("shape-overflows", 413, "/query/shape", "2^48", "", flat([2**31 - 1, 2**31 - 1, 4], [1])),
    Bad("shape-overflows-to-0", 413, "/query/shape", "2^48", "", flat([2**30, 2**30, 16], [1])),
    Bad(
        "form-unknown-member",
        422,
        "/query/dtype",
        "one of shape, datatype, data, base64",
        '"dtype"',
        flat([1, 4], [1, 2, 3, 4], dtype="FP32"),
    ),
    Bad("form-empty", 422, "/query/shape", "a list of lengths", "nothing", tiny(query={})),
]

FIELDS = [
    Bad("mask", 422, "/mask", "attend_mask, block_mask, attend_keys, block_keys", '"mask"', tiny(mask=zeros(3, 3))),
    Bad("unknown-field", 422, "/querry", "no field of that name", 'a field "querry" (did you mean query?)', tiny(querry=1)),
    Bad("unknown-flag", 422, "/caussal", "no field of that name", 'a field "caussal" (did you mean causal?)', tiny(caussal=True)),
    Bad("unlike-any", 422, "/xyz", "no field of that name", 'a field "xyz"', tiny(xyz=True)),
    Bad("unknown-field-escaped", 422, "/a~1b~0c", "no field of that name", "", tiny(**{"a/b~c": 1})),
    Bad(
        "metrics",
        422,
        "/metrics",
        "no field of that name, which belongs to POST /attend/analysis",
        'a field "metrics"',
        tiny(metrics=["entropy"]),
    ),
    Bad(
        "figure",
        422,
        "/figure",
        "no field of that name, which belongs to POST /attend/figure",
        'a field "figure"',
        tiny(figure={"format": "png"}),
    ),
    Bad("attn-mask", 422, "/attn_mask", "block_mask for the booleans of torch's Multi", 'a field "attn_mask"', tiny(attn_mask=zeros(3, 3))),
    Bad(
        "padding-mask",
        422,
        "/key_padding_mask",
        "attend_keys for their opposite, bias [b, 1, k] for floats",
        "",
        tiny(key_padding_mask=zeros(2, 3)),
    ),
    Bad("is-causal", 422, "/is_causal", "causal (key j is visible to query i if", 'a field "is_causal"', tiny(is_causal=True)),
    Bad("heads-in-a-call", 422, "/num_heads", "belongs to the spec of a layer (PUT", 'a field "num_heads"', tiny(num_heads=2)),
    Bad("alibi-in-a-call", 422, "/alibi", "belongs to the spec of a layer (PUT", 'a field "alibi"', tiny(alibi=True)),
    Bad("rope-in-a-call", 422, "/rope", "belongs to the spec of a layer (PUT", 'a field "rope"', tiny(rope={})),
    Bad("kdim-in-a-call", 422, "/kdim", "belongs to the spec of a layer (PUT", 'a field "kdim"', tiny(kdim=4)),
    Bad("unknown-in-reply", 422, "/reply/colour", "no field of that name", 'a field "colour"', tiny(reply={"colour": "red"})),
    Bad("unknown-in-window", 422, "/window/lef", "no field of that name", 'a field "lef" (did you mean left?)', tiny(window={"lef": 1})),
    Bad("unknown-in-select", 422, "/select/head", "no field of that name", "", tiny(select={"head": [0]})),
    Bad("unknown-in-dropout", 422, "/dropout/q", "no field of that name", 'a field "q"', tiny(dropout={"p": 0, "seed": 1, "q": 1})),
    Bad("unknown-in-tokens", 422, "/tokens/value", "no field of that name", "", tiny(tokens={"value": WORDS})),
    Bad("layer-unknown", 404, "/layer", "a loaded layer", '"nobody"', tiny(layer="nobody")),
    Bad("layer-misspelt", 404, "/layer", "a loaded layer", '"tinny" (did you mean tiny?)', tiny(layer="tinny")),
    Bad("output-misspelt", 422, "/outputs/0", "scores", '"score" (did you mean scores?)', tiny(outputs=["score"])),
    Bad("layer-number", 422, "/layer", "a string", "5", tiny(layer=5)),
    Bad("layer-null", 422, "/layer", "a string", "null", tiny(layer=None)),
    Bad("layer-empty", 422, "/layer", "", '""', tiny(layer="")),
    Bad("layer-leading-point", 422, "/layer", "", '".tiny"', tiny(layer=".tiny")),
    Bad("layer-slash", 422, "/layer", "", '"a/b"', tiny(layer="a/b")),
    Bad("layer-line-break", 422, "/layer", "", r'"tiny\n"', tiny(layer="tiny\n")),
    Bad("layer-65", 422, "/layer", "", '"aaa', tiny(layer="a" * 65)),
    Bad("value-without-key", 422, "/value", "key in addition to value", "value alone", tiny(value=QUERY)),
    Bad("batch-of-key", 422, "/key", "2 batch items", "1", tiny(key=QUERY[:1])),
    Bad("batch-of-value", 422, "/value", "2 batch items", "1", tiny(key=QUERY, value=QUERY[:1])),
    Bad("rank-of-key", 422, "/key", "rank 3, as the query", "rank 2", tiny(key=QUERY[0])),
    Bad("rank-of-value", 422, "/value", "rank 2, as the query", "rank 3", loose(key=QUERY[0], value=QUERY)),
    Bad("rows-of-value", 422, "/value", "5 rows, as the key", "4", cross(value=zeros(2, 4, 5))),
    Bad("width-of-query", 422, "/query", '4 values per query for layer "tiny"', "3", tiny(query=zeros(2, 3, 3))),
    Bad("width-of-key", 422, "/key", '3 values per key for layer "cross"', "4", cross(key=zeros(2, 5, 4))),
    Bad("width-of-value", 422, "/value", '5 values per value for layer "cross"', "3", cross(value=zeros(2, 5, 3))),
    Bad("width-of-key-by-default", 422, "/key", "3 values per key", "4 (taken from the query)", tiny(layer="cross")),
    Bad("width-of-value-by-default", 422, "/value", "5 values per value", "3 (taken from the key)", tiny(layer="cross", key=KEY)),
    Bad("fully-masked-word", 422, "/fully_masked", '"error", "uniform", "zero"', '"none"', tiny(fully_masked="none")),
    Bad("fully-masked-null", 422, "/fully_masked", '"zero"', "null", tiny(fully_masked=None)),
    Bad(
        "fully-masked-rows",
        422,
        "/fully_masked",
        "a key to attend to",
        "(batch 1, head 0, query 0)",
        tiny(valid_lens=[1, 0], fully_masked="error"),
    ),
    Bad(
        "fully-masked-head",
        422,
        "/fully_masked",
        "a key to attend to",
        "(batch 0, head 1, query 2)",
        tiny(block_mask=[[zeros(3, 3), [*zeros(2, 3), [1, 1, 1]]]] * 2, fully_masked="error"),
    ),
    Bad("head-scale-count", 422, "/head_scale", "2 heads", "3", tiny(head_scale=[1, 1, 1])),
    Bad("head-scale-per-item-count", 422, "/head_scale", "2 heads", "1", tiny(head_scale=[[1], [1]])),
    Bad("head-scale-batch", 422, "/head_scale", "[2, heads]", "shape [3, 2]", tiny(head_scale=zeros(3, 2))),
    Bad("head-scale-unbatched", 422, "/head_scale", "[heads]", "shape [1, 2]", loose(head_scale=[[1, 1]])),
    Bad("head-scale-rank", 422, "/head_scale", "rank 1 or 2", "shape [1, 1, 2]", tiny(head_scale=[[[1, 1]]])),
    Bad("head-scale-number", 422, "/head_scale", "rank 1 or 2", "shape []", tiny(head_scale=1)),
    Bad("head-scale-bool", 422, "/head_scale/0", "a number", "true", tiny(head_scale=[True, False])),
    Bad("head-scale-beyond", 422, "/head_scale/1", "a finite float32", "1e+39", tiny(head_scale=[1, 1e39])),
    Bad("dropout-1", 422, "/dropout/p", "less than 1", "1", tiny(dropout={"p": 1, "seed": 1})),
    Bad("dropout-negative", 422, "/dropout/p", "at least 0", "-0.1", tiny(dropout={"p": -0.1, "seed": 1})),
    Bad("dropout-string", 422, "/dropout/p", "a number", '"0.1"', tiny(dropout={"p": "0.1", "seed": 1})),
    Bad("dropout-true", 422, "/dropout/p", "a number", "true", tiny(dropout={"p": True, "seed": 1})),
    Bad("dropout-without-seed", 422, "/dropout/seed", "this required field", "nothing", tiny(dropout={"p": 0.1})),
    Bad("dropout-without-p", 422, "/dropout/p", "this required field", "nothing", tiny(dropout={"seed": 1})),
    Bad("dropout-seed-negative", 422, "/dropout/seed", "at least 0", "-1", tiny(dropout={"p": 0.1, "seed": -1})),
    Bad("dropout-seed-2^32", 422, "/dropout/seed", "4294967295", "4294967296", tiny(dropout={"p": 0.1, "seed": 2**32})),
    Bad("dropout-seed-fraction", 422, "/dropout/seed", "an integer", "1.5", tiny(dropout={"p": 0.1, "seed": 1.5})),
    Bad("dropout-number", 422, "/dropout", 'an object such as {"p": 0.1, "seed": 0}', "0.1", tiny(dropout=0.1)),
    Bad("scale-string", 422, "/scale", "a number", '"1"', tiny(scale="1")),
    Bad("scale-true", 422, "/scale", "a number", "true", tiny(scale=True)),
    Bad("softcap-negative", 422, "/softcap", "at least 0", "-1", tiny(softcap=-1)),
    Bad("softcap-list", 422, "/softcap", "a number", "a list of 1", tiny(softcap=[1])),
    Bad("reproducible-1", 422, "/reproducible", "true or false", "1", tiny(reproducible=1)),
    Bad("tokens-count", 422, "/tokens/query", "3 tokens", "2", tiny(tokens={"query": ["a", "b"]})),
    Bad("tokens-per-item-count", 422, "/tokens/key", "5 tokens", "4", cross(tokens={"key": [["a"] * 5, ["a"] * 4]})),
    Bad("tokens-items", 422, "/tokens/query", "one list of tokens, or 2, one per", "3 in a list", tiny(tokens={"query": [WORDS] * 3})),
    Bad("tokens-items-unbatched", 422, "/tokens/query", "one list of tokens, since", "1 in a list", loose(tokens={"query": [WORDS]})),
    Bad("tokens-number", 422, "/tokens/query/2", "a token, which is a string", "3", tiny(tokens={"query": ["a", "b", 3]})),
    Bad("tokens-string", 422, "/tokens/key", "a list of tokens", "", tiny(tokens={"key": "abc"})),
    Bad("tokens-half-a-pair", 422, "/tokens/query/1", "a token of Unicode text", "surrogate", tiny(tokens={"query": ["a", "\ud800", "c"]})),
    Bad("tokens-half-a-pair-per-item", 422, "/tokens/key/1/4", "Unicode", "", cross(tokens={"key": [["a"] * 5, [*"abcd", "\udfff"]]})),
    *(
        Bad(f"tokens-half-a-pair-at-{name}", 422, "/tokens/query/2", "a token of Unicode text", "", body, path=f"/attend/{path}")
        for name, path, body in (
            ("plan", "plan", tiny(tokens={"query": ["a", "b", "\ud83d"]})),
            ("analysis", "analysis", tiny(tokens={"query": ["a", "b", "c\ud83d"]})),
            ("links", "analysis", tiny(tokens={"query": ["a", "b", "\ude00\ud83d"]}, metrics=["strongest_links"])),
            ("figure", "figure", tiny(tokens={"query": ["a", "b", "\ude00c"]})),
        )
    ),
    Bad("name-half-a-pair", 422, "", "a string of Unicode text", "surrogate", tiny(**{"\ud800": 1})),
    Bad("name-half-a-pair-in-reply", 422, "/reply", "a string of Unicode text", "surrogate", tiny(reply={"\ud800": 1})),
    Bad("output-half-a-pair", 422, "/outputs/0", "", "", tiny(outputs=["\ud800"])),
    Bad("metric-half-a-pair", 422, "/metrics/0", "", "", tiny(metrics=["\ud800"]), path="/attend/analysis"),
    Bad("format-jpg", 422, "/figure/format", "png", '"jpg" (did you mean png?)', tiny(figure={"format": "jpg"}), path="/attend/figure"),
    Bad("title-half-a-pair", 422, "/figure/title", "Unicode text", "surrogate", tiny(figure={"title": "\ud800"}), path="/attend/figure"),
    Bad("text-half-a-pair", 422, "/text", "Unicode text", "surrogate", b'{"text": "a \\ud800"}', path="/words"),
    put("init-half-a-pair", "/spec/init", "", "", spec(init="\ud800")),
    put(
        "weight-half-a-pair",
        "/weights/\ud800",
        "",
        "",
        weights().replace(b'"query.weight"', rb'"\ud800": [[1, 0], [0, 1]], "query.weight"'),
    ),
]

MASKS = [
    Bad(
        "attend-and-block-mask",
        422,
        "/block_mask",
        "either attend_mask or block_mask",
        "both",
        tiny(attend_mask=zeros(3, 3), block_mask=zeros(3, 3)),
    ),
    Bad(
        "attend-and-block-keys",
        422,
        "/block_keys",
        "either attend_keys or block_keys",
        "both",
        tiny(attend_keys=zeros(2, 3), block_keys=zeros(2, 3)),
    ),
    Bad("mask-2", 422, "/attend_mask/1/2", "0, 1, true or false", "2", tiny(attend_mask=[[0, 0, 0], [0, 0, 2], [0, 0, 0]])),
    Bad("mask-half", 422, "/block_mask/2/0", "0, 1, true or false", "0.5", tiny(block_mask=[[0, 0, 0], [0, 0, 0], [0.5, 0, 0]])),
    Bad("mask-minus-1", 422, "/attend_keys/1/1", "0, 1, true or false", "-1", tiny(attend_keys=[[0, 0, 0], [0, -1, 0]])),
    Bad("mask-2-among-true", 422, "/attend_keys/1/1", "0, 1, true or false", "2", tiny(attend_keys=[[True, False, True], [True, 2, True]])),
    Bad("mask-string", 422, "/block_keys/0/1", "0, 1, true or false", '"1"', tiny(block_keys=[[0, "1", 0], [0, 0, 0]])),
    Bad("mask-null", 422, "/block_keys/0/2", "0, 1, true or false", "null", tiny(block_keys=[[0, 1, None], [0, 0, 0]])),
    Bad(
        "mask-minus-inf", 422, "/attend_mask/0/0", "0, 1, true or false", '"-inf"', tiny(attend_mask=[["-inf", 0, 0], [0, 0, 0], [0, 0, 0]])
    ),
    Bad("mask-true", 422, "/attend_mask", "rank 2 or 3 or 4", "shape []", tiny(attend_mask=True)),
    Bad("mask-rank-1", 422, "/attend_mask", "rank 2 or 3 or 4", "shape [3]", tiny(attend_mask=[1, 1, 1])),
    Bad("mask-keys", 422, "/attend_mask", "[3, 5]", "shape [3, 4]", cross(attend_mask=zeros(3, 4))),
    Bad("mask-queries", 422, "/block_mask", "[3, 5]", "shape [2, 5]", cross(block_mask=zeros(2, 5))),
    Bad("mask-transposed", 422, "/attend_mask", "[3, 5]", "shape [5, 3]", cross(attend_mask=zeros(5, 3))),
    Bad("mask-of-keys", 422, "/attend_mask", "[3, 5]", "shape [2, 5]", cross(attend_mask=zeros(2, 5))),
    Bad("mask-batch", 422, "/attend_mask", "[2, 3, 5]", "shape [3, 3, 5]", cross(attend_mask=zeros(3, 3, 5))),
    Bad("mask-batch-of-4", 422, "/attend_mask", "[2, heads, 3, 5]", "shape [3, 2, 3, 5]", cross(attend_mask=zeros(3, 2, 3, 5))),
    Bad("mask-heads", 422, "/attend_mask", '2 heads (or 1) for layer "cross"', "3", cross(attend_mask=zeros(2, 3, 3, 5))),
    Bad("mask-heads-unbatched", 422, "/block_mask", '2 heads (or 1) for layer "tiny"', "3", loose(block_mask=zeros(3, 3, 3))),
    Bad("mask-rank-4-unbatched", 422, "/attend_mask", "[heads, 3, 3]", "shape [1, 2, 3, 3]", loose(attend_mask=zeros(1, 2, 3, 3))),
    Bad("mask-zero-axis", 422, "/attend_mask", "[3, 5]", "shape [3, 0]", cross(attend_mask={"shape": [3, 0], "data": []})),
    Bad("key-mask-count", 422, "/attend_keys", "shape [2, 5]", "shape [2, 3]", cross(attend_keys=zeros(2, 3))),
    Bad("key-mask-batch", 422, "/block_keys", "shape [2, 5]", "shape [3, 5]", cross(block_keys=zeros(3, 5))),
    Bad("key-mask-without-batch", 422, "/attend_keys", "shape [2, 5]", "shape [5]", cross(attend_keys=zeros(5))),
    Bad("key-mask-unbatched", 422, "/attend_keys", "shape [3]", "shape [1, 3]", loose(attend_keys=zeros(1, 3))),
    Bad("key-mask-rank", 422, "/attend_keys", "rank 1 or 2", "shape [2, 1, 5]", cross(attend_keys=zeros(2, 1, 5))),
    Bad("segments-count", 422, "/segments", "shape [2, 3]", "shape [2, 5]", tiny(segments=zeros(2, 5))),
    Bad(
        "segments-of-keys-alone",
        422,
        "/key_segments",
        "query_segments in addition to key_segments",
        "key_segments alone",
        cross(key_segments=zeros(2, 5)),
    ),
    Bad("segments-twice", 422, "/query_segments", "either segments or", "both", tiny(segments=zeros(2, 3), query_segments=zeros(2, 3))),
    Bad("segments-minus-2", 422, "/segments/1/2", "or -1 for padding", "-2", tiny(segments=[[0, 0, 0], [0, 0, -2]])),
    Bad(
        "segments-large", 422, "/segments/0/0", "below 9007199254740992", "9007199254740992", tiny(segments=[[2**53 + 1, 0, 0], [0, 0, 0]])
    ),
    Bad("segments-half", 422, "/segments/0/1", "a whole number", "0.5", tiny(segments=[[0, 0.5, 0], [0, 0, 0]])),
    Bad("segments-of-cross-attention", 422, "/segments", "shape [2, 5]", "shape [2, 3]", cross(segments=zeros(2, 3))),
    Bad("bias-shape", 422, "/bias", "[3, 5]", "shape [5, 5]", cross(bias=zeros(5, 5))),
    Bad("bias-heads", 422, "/bias", "2 heads (or 1)", "4", cross(bias=zeros(2, 4, 3, 5))),
    Bad("bias-rank", 422, "/bias", "rank 2 or 3 or 4", "shape [5]", cross(bias=zeros(5))),
    Bad("bias-plus-inf", 422, "/bias/0/0", 'a number or "-inf"', '"inf"', tiny(bias=[["inf", 0, 0], [0, 0, 0], [0, 0, 0]])),
    Bad(
        "bias-other-spelling", 422, "/bias/0/1", 'a number or "-inf"', '"-Infinity"', tiny(bias=[[0, "-Infinity", 0], [0, 0, 0], [0, 0, 0]])
    ),
    Bad("bias-null", 422, "/bias/2/2", 'a number or "-inf"', "null", tiny(bias=[[0, 0, 0], [0, 0, 0], [0, 0, None]])),
    Bad("lens-too-large", 422, "/valid_lens/1", "at most 5, the number of keys", "6", cross(valid_lens=[5, 6])),
    Bad("lens-per-query-too-large", 422, "/valid_lens/1/2", "at most 5", "9", cross(valid_lens=[[1, 2, 3], [4, 5, 9]])),
    Bad("lens-first-of-two", 422, "/valid_lens/0", "at most 5", "6", cross(valid_lens=[6, 9])),
    Bad("lens-1e300", 422, "/valid_lens/0", "", "1e+300", cross(valid_lens=[1e300, 1])),
    Bad("lens-negative", 422, "/valid_lens/0", "a number of keys: a whole number of at least 0", "-1", cross(valid_lens=[-1, 2])),
    Bad("rows-negative", 422, "/query_lengths/1", "a number of rows: a whole number of at least 0", "-1", loose(query_lengths=[4, -1])),
    Bad("rows-fraction", 422, "/query_lengths/0", "a number of rows: a whole number of at least 0", "1.5", loose(query_lengths=[1.5, 2])),
    Bad("lens-fraction", 422, "/valid_lens/1", "a number of keys: a whole number of at least 0", "1.5", cross(valid_lens=[1, 1.5])),
    Bad("lens-shape", 422, "/valid_lens", "shape [2] or [2, 3]", "shape [3]", cross(valid_lens=[1, 2, 3])),
    Bad(
        "lens-shape-per-query",
        422,
        "/valid_lens",
        "shape [2] or [2, 3]",
        "shape [2, 5]",
        cross(valid_lens=zeros(2, 5)),
    ),
    Bad(
        "lens-scalar-in-batch",
        422,
        "/valid_lens",
        "shape [2] or [2, 3]",
        "a single number",
        cross(valid_lens=3),
    ),
    Bad("lens-unbatched", 422, "/valid_lens", "a single number, or shape [3]", "shape [1]", loose(valid_lens=[3])),
    Bad("lens-rank", 422, "/valid_lens", "rank 0 or 1 or 2", "shape [2, 3, 1]", tiny(valid_lens=zeros(2, 3, 1))),
    Bad("lens-true", 422, "/valid_lens/0", "a whole number", "true", cross(valid_lens=[True, 2])),
    Bad("lens-scalar-true", 422, "/valid_lens", "", "", loose(valid_lens=True)),
    Bad("lens-string", 422, "/valid_lens/1", "a whole number", '"2"', cross(valid_lens=[1, "2"])),
    Bad(
        "lens-large",
        422,
        "/valid_lens/1",
        "a number of keys: a whole number of at most 9007199254740991",
        "9007199254740992",
        cross(valid_lens=[1, 2**53]),
    ),
    Bad("lens-scalar-fraction", 422, "/valid_lens", "a number of keys: a whole number of at least 0", "2.5", loose(valid_lens=2.5)),
    Bad("lens-scalar-too-large", 422, "/valid_lens", "at most 3", "4", loose(valid_lens=4)),
    Bad("offset-fraction", 422, "/query_offset", "an integer", "1.5", tiny(query_offset=1.5)),
    Bad("offset-word", 422, "/query_offset", '"end"', '"start"', tiny(query_offset="start")),
    Bad("offset-true", 422, "/query_offset", "an integer", "true", tiny(query_offset=True)),
    Bad("offset-object", 422, "/query_offset", "an integer", "an object", tiny(query_offset={})),
    Bad("offset-nested", 422, "/query_offset", "an integer", "a list of 2", tiny(query_offset=[[0, 0]])),
    Bad("offset-list-with-end", 422, "/query_offset", "a list of integers", '"end" in a list', tiny(query_offset=[0, "end"])),
    Bad("offset-list-count", 422, "/query_offset", "2 offsets", "a list of 3", tiny(query_offset=[0, 1, 2])),
    Bad("offset-list-unbatched", 422, "/query_offset", 'one integer or "end"', "a list of 1", loose(query_offset=[0])),
    Bad("offset-2^31", 422, "/query_offset", "32 bits", "2147483648", tiny(query_offset=2**31)),
    Bad("offset-10^30", 422, "/query_offset", "32 bits", "1000", tiny(query_offset=10**30)),
    Bad("offset-missing-causal", 422, "/query_offset", "causal is on and 3 queries and 5 keys are given", "nothing", cross(causal=True)),
    Bad(
        "offset-missing-window",
        422,
        "/query_offset",
        "window is on and 3 queries and 5 keys are given",
        "nothing",
        cross(window={"left": 1}),
    ),
    Bad("offset-null-causal", 422, "/query_offset", "causal is on", "nothing", cross(causal=True, query_offset=None)),
    Bad("causal-1", 422, "/causal", "true or false", "1", tiny(causal=1)),
    Bad("causal-string", 422, "/causal", "true or false", '"true"', tiny(causal="true")),
    Bad("causal-null", 422, "/causal", "true or false", "null", tiny(causal=None)),
    Bad("window-number", 422, "/window", 'an object such as {"left": 128, "right": 0}', "3", tiny(window=3)),
    Bad("window-list", 422, "/window", "an object", "a list of 2", tiny(window=[1, 2])),
    Bad("window-negative", 422, "/window/left", "at least 0", "-1", tiny(window={"left": -1})),
    Bad("window-fraction", 422, "/window/right", "an integer", "1.5", tiny(window={"right": 1.5})),
    Bad("window-true", 422, "/window/left", "an integer", "true", tiny(window={"left": True})),
]

REPLIES = [
    Bad("outputs-unknown", 422, "/outputs/1", "attention_weights", '"weights"', tiny(outputs=["output", "weights"])),
    Bad("outputs-empty", 422, "/outputs", "at least 1", "a list of 0", tiny(outputs=[])),
    Bad("outputs-twice", 422, "/outputs/2", "each output once", '"output" twice', tiny(outputs=["output", "scores", "output"])),
    Bad("outputs-string", 422, "/outputs", "a list", '"output"', tiny(outputs="output")),
    Bad("outputs-null", 422, "/outputs", "a list", "null", tiny(outputs=None)),
    Bad("outputs-number", 422, "/outputs/0", "a string", "1", tiny(outputs=[1])),
    Bad(
        "select-without-weights",
        422,
        "/select",
        "attention_weights among the outputs",
        "without",
        tiny(outputs=["output"], select={"heads": [0]}),
    ),
    Bad("select-head", 422, "/select/heads/1", "a head below 2", "2", tiny(select={"heads": [0, 2]})),
    Bad("select-head-negative", 422, "/select/heads/0", "at least 0", "-1", tiny(select={"heads": [-1]})),
    Bad("select-head-twice", 422, "/select/heads/2", "each index once", "1 twice", tiny(select={"heads": [1, 0, 1]})),
    Bad("select-head-true", 422, "/select/heads/0", "an integer", "true", tiny(select={"heads": [True]})),
    Bad("select-heads-empty", 422, "/select/heads", "at least 1", "a list of 0", tiny(select={"heads": []})),
    Bad("select-heads-number", 422, "/select/heads", "a list", "0", tiny(select={"heads": 0})),
    Bad("select-query", 422, "/select/queries/0", "a query below 3", "3", tiny(select={"queries": [3]})),
    Bad("select-query-twice", 422, "/select/queries/1", "each index once", "0 twice", tiny(select={"queries": [0, 0]})),
    Bad("select-query-10^30", 422, "/select/queries/0", "", "1000", tiny(select={"queries": [10**30]})),
    Bad("select-average-1", 422, "/select/average", "true or false", "1", tiny(select={"average": 1})),
    Bad("select-top-0", 422, "/select/top_k", "at least 1", "0", tiny(select={"top_k": 0})),
    Bad("select-top-fraction", 422, "/select/top_k", "an integer", "1.5", tiny(select={"top_k": 1.5})),
    Bad("select-list", 422, "/select", "an object", "a list of 1", tiny(select=[0])),
    Bad("reply-form", 422, "/reply/form", '"base64", "flat", "nested"', '"xml"', tiny(reply={"form": "xml"})),
    Bad("reply-datatype", 422, "/reply/datatype", '"BF16", "FP16", "FP32", "FP64"', '"float32"', tiny(reply={"datatype": "float32"})),
    Bad("reply-datatype-int", 422, "/reply/datatype", '"BF16", "FP16", "FP32", "FP64"', '"INT8"', tiny(reply={"datatype": "INT8"})),
    Bad("reply-decimals-negative", 422, "/reply/decimals", "at least 0", "-1", tiny(reply={"decimals": -1})),
    Bad("reply-decimals-18", 422, "/reply/decimals", "at most 17", "18", tiny(reply={"decimals": 18})),
    Bad("reply-decimals-fraction", 422, "/reply/decimals", "an integer", "1.5", tiny(reply={"decimals": 1.5})),
    Bad("reply-decimals-base64", 422, "/reply/decimals", "text", "base64", tiny(reply={"decimals": 3, "form": "base64"})),
    Bad("reply-nonfinite", 422, "/reply/nonfinite", '"error", "null", "string"', '"nan"', tiny(reply={"nonfinite": "nan"})),
    Bad("reply-null", 422, "/reply", "an object", "null", tiny(reply=None)),
    Bad("reply-string", 422, "/reply", "an object", '"flat"', tiny(reply="flat")),
    *(
        Bad(
            f"overflow-{form}",
            422,
            "/reply/datatype",
            "finite numbers in query_projection as FP16",
            "query_projection[1, 1, 2, 0] = inf",
            json.dumps(
                {
                    "layer": "same",
                    "query": [*QUERY[:1], [*QUERY[1][:2], [1, 2, 70000, 9]]],
                    "outputs": ["query_projection"],
                    "reply": {"form": form, "datatype": "FP16"},
                }
            ).encode(),
        )
        for form in ("nested", "flat", "base64")
    ),
    Bad(
        "nan-from-overflowing-scores",
        422,
        "",
        "finite numbers in attention_weights",
        "attention_weights[0, 0, 0, 0] = nan",
        json.dumps({"layer": "same", "query": [[[1e30, 1, 1, 1]]], "outputs": ["attention_weights"]}).encode(),
    ),
    Bad(
        "nan-from-scores-that-overflow-downwards-under-a-mask",  # a row that has a key, but no score
        422,
        "",
        "finite numbers in attention_weights",
        "attention_weights[0, 0, 0, 0] = nan",
        json.dumps(
            {
                "layer": "same",
                "query": [[[1e30, 1, 1, 1]]],
                "key": [[[-1e30, 1, 1, 1]] * 2],
                "valid_lens": [1],
                "outputs": ["attention_weights"],
            }
        ).encode(),
    ),
]

LAYERS = [
    put("name-leading-point", "", "a layer name", '".bad"', spec(), path="/layers/.bad"),
    put("name-space", "", "a layer name", '"a b"', spec(), path="/layers/a%20b"),
    put("name-65", "", "a layer name", '"aaa', spec(), path="/layers/" + "a" * 65),
    put("name-line-break", "", "a layer name", r'"bad\n"', spec(), path="/layers/bad%0A"),
    put("name-umlaut", "", "a layer name", '"ä"', spec(), path="/layers/%C3%A4"),
    put("no-json", "", "JSON", "", b"{", status=400),
    put("no-spec", "/spec", 'an object such as {"d_model": 64, "num_heads": 8}', "nothing", b"{}"),
    put(
        "spec-alone",
        "/d_model",
        "no field of that name",
        'a field "d_model"',
        b'{"d_model": 4, "num_heads": 2, "spec": {"d_model": 4, "num_heads": 2}}',
    ),
    put("spec-null", "/spec", 'an object such as {"d_model": 64, "num_heads": 8}', "null", b'{"spec": null}'),
    put("spec-half-wrapped", "/seed", 'belongs inside "spec"', 'a field "seed"', b'{"spec": {"d_model": 4, "num_heads": 2}, "seed": 3}'),
    put("window-number", "/spec/window", 'an object such as {"left": 128, "right": 0}', "3", spec(window=3)),
    put("gate-flag", "/spec/output_gate", 'an object such as {"granularity": "elementwise"}', "true", spec(output_gate=True)),
    put("rope-number", "/spec/rope", 'an object such as {"theta": 10000.0}', "10000", spec(rope=10000)),
    put("norm-string", "/spec/qk_norm", 'an object such as {"kind": "rms"}', '"rms"', spec(qk_norm="rms")),
    put("norm-eps-tiny", "/spec/qk_norm/eps", "0, or a number from 1e-30 to 1", "5e-324", spec(qk_norm={"eps": 5e-324})),
    put("norm-eps-huge", "/spec/qk_norm/eps", "at most 1", "1e+308", spec(qk_norm={"eps": 1e308})),
    put("norm-eps-negative", "/spec/qk_norm/eps", "at least 0", "-1e-06", spec(qk_norm={"eps": -1e-6})),
    put("theta-tiny", "/spec/rope/theta", "at least 1e-30", "5e-324", spec(rope={"theta": 5e-324})),
    put("theta-huge", "/spec/rope/theta", "at most 1e+30", "1e+308", spec(rope={"theta": 1e308})),
    put(
        "latent-value-dim",
        "/spec/value_dim",
        "5, the key_dim, since latent projects keys and values by one matrix",
        "4",
        spec(key_dim=5, value_dim=4, latent={"key_value_rank": 3, "rope_key_dim": 1}),
    ),
    put("spec-list", "/spec", "an object", "a list of 0", b'{"spec": []}'),
    *(
        put(
            f"query-scale-{name}-{value}",
            f"/spec/query_scale/{name}",
            "at most",
            "",
            spec(query_scale={"factor": 1, "length": 1, name: value}),
        )
        for name, value in (("shift", 2**31), ("shift", 2**64), ("factor", 1e31))
    ),
    put("twice", "/spec/seed", "each key once", "twice", b'{"spec": {"seed": 1, "d_model": 4, "num_heads": 2, "seed": 2}}', status=400),
    put("d-model-missing", "/spec/d_model", "this required field", "nothing", b'{"spec": {"num_heads": 2}}'),
    put("heads-missing", "/spec/num_heads", "this required field", "nothing", b'{"spec": {"d_model": 4}}'),
    put("d-model-0", "/spec/d_model", "at least 1", "0", spec(d_model=0)),
    put("d-model-fraction", "/spec/d_model", "an integer", "4.5", spec(d_model=4.5)),
    put("d-model-true", "/spec/d_model", "an integer", "true", spec(d_model=True)),
    put("d-model-string", "/spec/d_model", "an integer", '"4"', spec(d_model="4")),
    put("d-model-10^30", "/spec/d_model", "", "1000", spec(d_model=10**30)),
    put("heads-0", "/spec/num_heads", "at least 1", "0", spec(num_heads=0)),
    put("heads-no-divisor", "/spec/num_heads", "a divisor of d_model 4", "3", spec(num_heads=3)),
    put("heads-beyond-width", "/spec/num_heads", "a divisor of d_model 4", "8", spec(num_heads=8)),
    put("key-dim-0", "/spec/key_dim", "at least 1", "0", spec(key_dim=0)),
    put("value-dim-negative", "/spec/value_dim", "at least 1", "-5", spec(value_dim=-5)),
    put("bias-1", "/spec/bias", "true or false", "1", spec(bias=1)),
    put("bias-string", "/spec/bias", "true or false", '"yes"', spec(bias="yes")),
    put("scale-0", "/spec/scale", "a number other than 0, or null for the default", "0.0", spec(scale=0)),
    put("scale-minus-0", "/spec/scale", "a number other than 0", "0.0", spec(scale=-0.0)),
    put("axes-with-a-gap", "/spec/rope/axes", "each axis from 0 to 2", "no pair with axis 1", spec(head_dim=6, rope={"axes": [0, 2, 2]})),
    put("axes-from-1", "/spec/rope/axes", "each axis from 0 to 1", "no pair with axis 0", spec(head_dim=4, rope={"axes": [1, 1]})),
    put("scale-string", "/spec/scale", "a number", '"1"', spec(scale="1")),
    put("scale-nan", "/spec/scale", "a JSON number", "NaN", b'{"spec": {"d_model": 4, "num_heads": 2, "scale": NaN}}', status=400),
    put("softcap-negative", "/spec/softcap", "at least 0", "-1", spec(softcap=-1)),
    put("softcap-false", "/spec/softcap", "a number", "false", spec(softcap=False)),
    put("bias-zero", "/spec/bias", "true or false", "", spec(bias={"query": False, "key": False, "value": False, "output": 0})),
    put("bias-other-names", "/spec/bias", "true or false", "", spec(bias=dict.fromkeys("abcd", True))),
    put("seed-negative", "/spec/seed", "at least 0", "-1", spec(seed=-1)),
    put("seed-2^32", "/spec/seed", "4294967295", "4294967296", spec(seed=2**32)),
    put("seed-string", "/spec/seed", "an integer", '"7"', spec(seed="7")),
    put("init", "/spec/init", '"xavier_uniform"', '"kaiming"', spec(init="kaiming")),
    put("dtype", "/spec/dtype", '"bfloat16"', '"FP32"', spec(dtype="FP32")),
    put("unknown", "/spec/heads", "no field of that name", 'a field "heads" (did you mean num_heads?)', spec(heads=2)),
    put("embed-dim", "/spec/embed_dim", "d_model", 'a field "embed_dim"', spec(embed_dim=4)),
    put("gain-0", "/spec/gain", "at least 1e-06", "0", spec(gain=0)),
    put("gain-tiny", "/spec/gain", "at least 1e-06", "5e-324", spec(gain=5e-324)),
    put("gain-huge", "/spec/gain", "at most 1e+06", "1e+30", spec(gain=1e30)),
    put("gain-beyond-dtype", "/spec/gain", "a factor whose weights are finite in float16", "1000000.0", spec(gain=1e6, dtype="float16")),
    put("numpy-key-dim", "/spec/key_dim", "4, since init numpy_normal", "3", spec(init="numpy_normal", key_dim=3)),
    put("numpy-value-dim", "/spec/value_dim", "4, since init numpy_uniform", "5", spec(init="numpy_uniform", value_dim=5)),
    put("numpy-bias", "/spec/bias", "false, since init numpy_normal", "true", spec(init="numpy_normal", bias=True)),
    put("weights-list", "/weights", "an object", "a list of 0", b'{"spec": {"d_model": 4, "num_heads": 2}, "weights": []}'),
    put(
        "weights-empty",
        "/weights/query.weight",
        "a tensor of shape [4, 4]",
        "nothing",
        b'{"spec": {"d_model": 4, "num_heads": 2}, "weights": {}}',
    ),
    put(
        "weights-without-biases",
        "/weights/query.bias",
        'a tensor of shape [2], or "bias": false in the spec',
        "nothing",
        weights().replace(b'"bias": false', b'"bias": true'),
    ),
    put(
        "weights-with-some-biases",
        "/weights/key.bias",
        'a tensor of shape [2], or "bias": {"query": true, "key": false, "value": true, "output": false} in the spec',
        "nothing",
        weights()
        .replace(b'"bias": false', b'"bias": true')
        .replace(b'{"query.w', b'{"query.bias": [0, 0], "value.bias": [1, 2], "query.w'),
    ),
    put("weights-missing", "/weights/value.weight", "a tensor of shape [2, 2]", "nothing", weights(value=None)),
    put("weights-surplus", "/weights/extra.weight", "one of key.weight, output.weight", '"extra.weight"', weights(extra=[1])),
    put(
        "weights-surplus-bias",
        "/weights/query.bias",
        "one of",
        '"query.bias"',
        weights().replace(b'"query.weight"', b'"query.bias": [0, 0], "query.weight"'),
    ),
    put("weights-surplus-escaped", "/weights/a~1b.weight", "one of", '"a/b.weight"', weights(**{"a/b": [1]})),
    put(
        "weights-mixed",
        "/weights",
        "the names of one layout: attend (query.weight, key.weight, value.weight, output.weight) or numpy (W_q, W_k, W_v, W_o)",
        "key.weight, output.weight, value.weight and W_q together",
        weights().replace(b"query.weight", b"W_q"),
    ),
    *(
        put(
            f"weights-{scheme}-and-gain",
            "/spec/gain",
            "nothing, since the weights are given and none is drawn",
            "2.0",
            body.replace(b'"bias": false', b'"bias": false, "gain": 2.0'),
        )
        for scheme, body in (("own", weights()), ("numpy", NUMPY_WEIGHTS))
    ),
    put("weights-shape", "/weights/key.weight", "shape [2, 2]", "shape [2, 1]", weights(key=[[1], [2]])),
    put("weights-rank", "/weights/key.weight", "", "shape [4]", weights(key=[1, 0, 0, 1])),
    put("weights-ragged", "/weights/output.weight/1", "2 values", "1", weights(output=[[1, 0], [1]])),
    put("weights-list-inside", "/weights/output.weight/1/1", "a number", "a list of 1", weights(output=[[1, 0], [0, [1]]])),
    put("weights-string", "/weights/query.weight/0/1", "a number", '"0"', weights(query=[[1, "0"], [0, 1]])),
    put("weights-null", "/weights/query.weight", "a tensor", "null", weights().replace(b"[[1, 0], [0, 1]]", b"null", 1)),
    put("weights-nan", "/weights/query.weight/0/1", "a JSON number", "NaN", weights().replace(b"0", b"NaN", 1), status=400),
    put("weights-1e999", "/weights/query.weight/0/1", "a finite number", "", weights().replace(b"0", b"1e999", 1)),
    put("weights-beyond-float32", "/weights/value.weight/1/0", "a finite float32", "1e+39", weights(value=[[1, 0], [1e39, 1]])),
    put(
        "weights-nan-in-base64",
        "/weights/key.weight/0/0",
        "a finite float32",
        "nan",
        weights(key={"shape": [2, 2], "datatype": "FP32", "base64": packed([np.nan, 0, 0, 1], "<f4")}),
    ),
    put(
        "weights-twice", "/weights/key.weight", "each key once", "twice", weights().replace(b'"value.weight"', b'"key.weight"'), status=400
    ),
    put("parameters", "/spec", "at most 268435456 parameters", "268468224", spec(d_model=8192), status=413),
    put("parameters-2^62", "/spec", "at most 268435456 parameters", "", spec(d_model=2**31 - 2), status=413),
    Bad("delete-unknown", 404, "", "a loaded layer", '"nobody"', method="DELETE", path="/layers/nobody"),
    *(
        Bad(f"get-unknown{part}", 404, "", "a loaded layer", '"nobody"', method="GET", path=f"/layers/nobody{part}")
        for part in ("", "/weights", "/circuits")
    ),
]

HTTP = [
    *(
        Bad(f"content-type-{media}", 415, "", "application/json", f'"{media}"', tiny(), headers={"content-type": media})
        for media in ("text/plain", "image/png", "multipart/form-data", "application/xml", "json")
    ),
    Bad("content-type-charset", 415, "", "application/json", '"text/plain"', tiny(), headers={"content-type": "text/plain; charset=utf-8"}),
    Bad(
        "content-type-plan",
        415,
        "",
        "application/json",
        '"text/plain"',
        tiny(),
        path="/attend/plan",
        headers={"content-type": "text/plain"},
    ),
    Bad("content-type-put", 415, "", "application/json", '"text/plain"', spec(), "PUT", "/layers/bad", {"content-type": "text/plain"}),
    *(
        Bad(f"accept-{accept}", 406, "", "application/json", f'"{accept}"', tiny(), headers={"accept": accept})
        for accept in (
            "image/png",
            "text/html, image/*",
            "application/json;q=0",
            "*/*;q=0",
            "application/*;q=0, */*;q=1",
        )
    ),
    Bad("get-attend", 405, None, "", "", method="GET"),
    Bad("put-attend", 405, None, "", "", tiny(), method="PUT"),
    Bad("get-plan", 405, None, "", "", method="GET", path="/attend/plan"),
    Bad("post-layers", 405, None, "", "", spec(), path="/layers"),
    Bad("post-layer", 405, None, "", "", spec(), path="/layers/tiny"),
    Bad("patch-layer", 405, None, "", "", spec(), "PATCH", "/layers/tiny"),
    Bad("post-health", 405, None, "", "", path="/health/live"),
    Bad("delete-index", 405, None, "", "", method="DELETE", path="/"),
    *(
        Bad(f"no-page{path.replace('/', '-')}", 404, None, "", "", tiny(), method, path)
        for method, path in (
            ("GET", "/nowhere"),
            ("POST", "/attend/"),
            ("POST", "/Attend"),
            ("GET", "/health"),
            ("GET", "/layers/"),
            ("PUT", "/layers/a/b"),
            ("PUT", "/layers/a%2Fb"),
            ("GET", "/layers/..%2F..%2Fetc%2Fpasswd"),
            ("GET", "/favicon.ico"),
        )
    ),
    Bad("body-too-large", 413, "", f"at most {LIMIT} bytes", f"{LIMIT + 1}", tiny() + b" " * (LIMIT + 1 - len(tiny()))),
    Bad("put-too-large", 413, "", f"at most {LIMIT} bytes", "", spec() + b" " * LIMIT, "PUT", "/layers/bad"),
    Bad(
        "too-many-scores",
        413,
        "",
        "at most 268435456 weights and scores",
        "288000000",
        json.dumps({"layer": "thin", "query": zeros(12000, 2), "outputs": ["attention_weights"]}).encode(),
    ),
]

TABLE = [*SYNTAX, *TENSORS, *CODECS, *FIELDS, *MASKS, *REPLIES, *LAYERS, *HTTP]


def check_refusal(bad: Bad, answer: httpx.Response) -> None:
    """Asserts that the refusal is that of the row, in the form of RFC 9457."""
    assert answer.status_code == bad.status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert list(problem) == ["type", "title", "status", "detail", "request_id", "errors"]
    assert problem["status"] == bad.status
    assert problem["title"] == ("no such page" if bad.status == 404 and bad.at is None else TITLES[bad.status])
    assert problem["request_id"] == answer.headers["x-request-id"] != ""
    for forbidden in ("Traceback", "/service/", ".py", "site-packages"):
        assert forbidden not in answer.text
    if bad.at is None:
        assert problem["errors"] == []
        return
    first = problem["errors"][0]
    assert first["at"] == bad.at
    assert bad.expected in first["expected"]
    assert bad.got in first["got"]
    assert f"expected {first['expected']}, got {first['got']}" in problem["detail"]
    assert max(len(first["expected"]), len(first["got"])) < 400, "a refusal is short"


@pytest.mark.parametrize("bad", TABLE, ids=lambda bad: bad.name)
def test_malformed_requests_are_refused(http: httpx.Client, assert_still_answers: Callable[[], None], bad: Bad) -> None:
    """With status, pointer and text. The server answers a valid request afterwards."""
    answer = http.request(bad.method, bad.path, content=bad.body, headers=dict(bad.headers))

    check_refusal(bad, answer)
    assert_still_answers()


def test_the_table_has_at_least_sixty_rows_with_unique_names() -> None:
    assert len({bad.name for bad in TABLE}) == len(TABLE) >= 60


def test_no_refused_layer_was_created(http: httpx.Client, layers: dict[str, Any]) -> None:
    assert "bad" not in {layer["name"] for layer in http.get("/layers").json()["layers"]}


@pytest.mark.parametrize(
    ("path", "method", "allowed"),
    [
        ("/attend", "GET", {"POST"}),
        ("/attend", "DELETE", {"POST"}),
        ("/attend/plan", "PUT", {"POST"}),
        ("/layers", "POST", {"GET", "HEAD"}),
        ("/layers/tiny", "POST", {"GET", "HEAD", "PUT", "DELETE"}),
        ("/health/ready", "DELETE", {"GET", "HEAD"}),
        ("/metrics", "POST", {"GET", "HEAD"}),
        ("/", "POST", {"GET", "HEAD"}),
        ("/openapi.json", "POST", {"GET", "HEAD"}),
        ("/docs", "POST", {"GET", "HEAD"}),
    ],
)
def test_a_wrong_method_is_405_with_allow(http: httpx.Client, path: str, method: str, allowed: set[str]) -> None:
    """HEAD is listed with every GET."""
    answer = http.request(method, path)

    assert answer.status_code == 405
    assert {verb.strip() for verb in answer.headers["allow"].split(",")} == allowed


def test_a_chunked_body_that_grows_too_large_is_refused(http: httpx.Client, assert_still_answers: Callable[[], None]) -> None:
    """Without a Content-Length the limit applies as the body arrives."""

    def pieces() -> Iterator[bytes]:
        for _ in range(LIMIT // 65536 + 2):
            yield b" " * 65536

    answer = http.post("/attend", content=pieces(), headers={"content-type": "application/json"})

    check_refusal(Bad("", 413, "", f"at most {LIMIT} bytes", f"more than {LIMIT}"), answer)
    assert_still_answers()


def test_a_body_of_exactly_the_limit_is_accepted(http: httpx.Client, layers: dict[str, Any]) -> None:
    body = tiny(outputs=["log_sum_exp"])

    answer = http.post("/attend", content=body + b" " * (LIMIT - len(body)))

    assert answer.status_code == 200, answer.text


def test_several_faults_are_reported_at_once(http: httpx.Client, layers: dict[str, Any]) -> None:
    """Each invalid field has its own entry."""
    answer = http.post("/attend", content=tiny(causal=1, outputs=[], extra=1, dropout={"p": 2}))

    assert answer.status_code == 422
    assert {error["at"] for error in answer.json()["errors"]} == {"/causal", "/outputs", "/extra", "/dropout/p", "/dropout/seed"}


def test_a_refusal_of_many_faults_is_small(http: httpx.Client, layers: dict[str, Any]) -> None:
    """A hundred thousand unknown fields get a few entries."""
    body = tiny(**{f"field{i}": 0 for i in range(100_000)})

    answer = http.post("/attend", content=body)

    assert answer.status_code == 413
    assert len(answer.content) < 64 * 1024


@pytest.mark.parametrize("field", ["heads", "queries"])
def test_refusing_a_long_selection_takes_linear_time(http: httpx.Client, layers: dict[str, Any], field: str) -> None:
    answer = http.post("/attend", content=tiny(select={field: list(range(60_000))}), timeout=5)

    assert answer.status_code == 422
    assert answer.json()["errors"][0]["at"] == f"/select/{field}/{2 if field == 'heads' else 3}"


@pytest.mark.parametrize(
    "media", [None, "application/x-www-form-urlencoded", "application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.mine+json"]
)
def test_content_types_that_are_read_as_json(http: httpx.Client, layers: dict[str, Any], media: str | None) -> None:
    """No type, curl's form type, and JSON under its names."""
    answer = http.post("/attend", content=tiny(), headers={} if media is None else {"content-type": media})

    assert answer.status_code == 200, answer.text


def test_errors_ignore_accept(http: httpx.Client, layers: dict[str, Any]) -> None:
    """A refusal is a problem document whatever the client accepts."""
    answer = http.post("/attend", content=b"{", headers={"accept": "application/json"})
    layer = http.get("/layers/nobody", headers={"accept": "image/png"})

    assert answer.headers["content-type"] == layer.headers["content-type"] == "application/problem+json"


def test_a_byte_order_mark_is_ignored(http: httpx.Client, layers: dict[str, Any]) -> None:
    """As RFC 8259, section 8.1, allows; by the fast and by the strict parser."""
    fast = http.post("/attend", content=b"\xef\xbb\xbf" + tiny())
    slow = http.post("/attend", content=b"\xef\xbb\xbf" + tiny(select={"top_k": 10**30}))

    assert (fast.status_code, slow.status_code) == (200, 200), slow.text


def test_the_limit_on_parameters_is_shared_by_all_layers(start_here: Callable[..., str]) -> None:
    """A layer that would fit alone is refused if it does not fit with the others, but may replace one of them."""
    url = start_here(max_total_parameters=17000)  # the layer `default` has 4 * 64 * 64 + 4 * 64 = 16640
    with httpx.Client(base_url=url) as client:
        check_refusal(
            put("", "/spec", "at most 17000 parameters in all layers", "1088 in addition to 16640 in other layers", b"", 413),
            client.put("/layers/a", content=spec(d_model=16)),
        )
        assert client.put("/layers/default", content=spec(d_model=16)).status_code == 200
        assert client.put("/layers/a", content=spec(d_model=16)).status_code == 201


def test_the_log_has_no_unexpected_exception(http: httpx.Client, server: Any, layers: dict[str, Any]) -> None:
    """After all requests above."""
    surprises = [event for event in server.events if event["event"] == "internal_error" or "exception" in event]

    assert [str(event.get("exception"))[:200] for event in surprises] == []


def test_the_log_contains_no_payload(http: httpx.Client, server: Any, layers: dict[str, Any]) -> None:
    """Neither numbers nor words of a request, answered or refused."""
    number, word = 1234.56789, "unmistakable"
    query = [[number, 2, 3, 4], [1, 2, 3, 4]]
    answered = loose(query=query, tokens={"query": [word, "b"]})
    for body in (answered, answered[:-1], raw(f"[[{number}, 1], [2]]"), loose(query=query, tokens={"query": [word]})):
        http.post("/attend", content=body, headers={"x-request-id": "payload-test"})

    def lines() -> list[str]:
        return [line for line in server.log if "payload-test" in line]

    until(lambda: len(lines()) == 4, "a line for each")  # written after its answer, and read by a thread
    assert not [line for line in lines() if "1234.5" in line or word in line]


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_stack_trace_in_the_log_contains_no_payload(log_format: str) -> None:
    """It has places in the code, and no values of variables."""
    script = (
        "import structlog\n"
        "from attend.cli.logs import configure_logs\n"
        f"configure_logs({log_format!r}, 'info')\n"
        "body = b'unmistak' + b'able'\n"
        "try:\n"
        "    raise RuntimeError('broken')\n"
        "except RuntimeError:\n"
        "    structlog.get_logger('attend').exception('internal_error')\n"
    )

    log = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stderr

    assert "RuntimeError" in log and "broken" in log
    assert "unmistakable" not in log
