"""Checks of the decoders, for any bytes: a decoder raises a RequestError, or reads the same values as a slower, independent decoder.

`run.py` searches for bytes for which a check fails. `corpus.json` has a minimal set of the fuzzer's inputs: together they cover every line
and branch that any of its inputs covered.
"""

import gzip
import zlib
from contextlib import suppress
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from attend.errors import RequestError
from attend.limits import WireLimits
from attend.spec import LayerSpec
from attend.tensors import DATATYPES
from attend.wire import safetensors
from attend.wire.compression import unpack
from attend.wire.json import reader
from attend.wire.json.strict import parse_strictly
from attend.wire.problems import validate
from attend.wire.schemas.attend import AttendRequest
from attend.wire.schemas.layers import PutLayer
from attend.wire.v2.codec import CODEC

LIMITS = WireLimits(max_body_bytes=1 << 20, max_depth=16)
TOKENS = (
    "shape datatype data base64 heads queries top_k left right p seed -inf end zero FP32 BF16 nested dtype data_offsets request F32 BOOL"
)
PROTOCOL = "id parameters inputs outputs name binary_data binary_data_size binary_data_output timeout priority attention_weights.keys INT64"
WORDS = [*AttendRequest.model_fields, *LayerSpec.model_fields, *TOKENS.split(), *PROTOCOL.split(), "__metadata__", "query.weight"]
BYTES_ALONE = 0xFFFF  # in place of a length: a V2 body without the header that says where its JSON ends


def _v2_seed(head: bytes, tensors: bytes = b"") -> bytes:
    return (len(tensors) or BYTES_ALONE).to_bytes(2, "little") + head + tensors


SEEDS = {
    "json": [
        b'{"query": [[1, 2.5e-3, -0], [3, 4, 5]], "causal": true, "outputs": ["output"], "valid_lens": 2, "bias": [[0, "-inf"], [1, 2]]}',
        b'{"query": {"shape": [1, 2, 2], "datatype": "FP32", "data": [1, 2, 3, 4]}, "query_offset": "end", "tokens": {"query": ["a"]}}',
        b'{"query": {"shape": [2, 2], "datatype": "FP16", "base64": "AAAAAAAAAAA="}, "select": {"heads": [0], "top_k": 2}, "scale": 1e-2}',
    ],
    "layer": [b'{"spec": {"d_model": 2, "num_heads": 1, "rope": {"theta": 1e4}}, "weights": {"query.weight": [[1, 2], [3, 4]]}}'],
    "safetensors": [
        (lambda head: len(head).to_bytes(8, "little") + head + bytes(24))(
            b'{"__metadata__":{"request":"{}"},"query":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},'
            b'"key":{"dtype":"BF16","shape":[2,2],"data_offsets":[16,24]}}'
        )
    ],
    "v2": [
        _v2_seed(
            b'{"id":"a","inputs":[{"name":"query","shape":[1,2,2],"datatype":"FP32","parameters":{"binary_data_size":16}},{"name":"attend_keys",'
            b'"shape":[1,2],"datatype":"BOOL","parameters":{"binary_data_size":2}}],"parameters":{"binary_data_output":true,"causal":true}}',
            bytes(16) + b"\x01\x00",
        ),
        _v2_seed(
            b'{"inputs":[{"name":"query","shape":[2,2],"datatype":"BF16","data":[1,2.5,3,-4]}],"outputs":[{"name":"attention_weights.keys",'
            b'"parameters":{"binary_data":true}}],"parameters":{"select":"{\\"top_k\\": 1}","timeout":5}}'
        ),
        _v2_seed(
            b'{"inputs":[{"name":"query","shape":[1,2,1],"datatype":"INT8","parameters":{"binary_data_size":2}},{"name":"valid_lens",'
            b'"shape":[1,1],"datatype":"INT64","data":[[1]]},{"name":"query_offset","shape":[1,1],"datatype":"INT16","data":[1]}]}',
            b"\x01\xff",
        ),
    ],
    "gzip": [gzip.compress(b"attend" * 50), gzip.compress(b"a") + gzip.compress(b"b")],
    "deflate": [zlib.compress(b"attend" * 50)],
}


def check_json(body: bytes) -> None:
    _document(body, AttendRequest)


def check_layer(body: bytes) -> None:
    _document(body, PutLayer)


def _document(body: bytes, model: Any) -> None:
    with suppress(RequestError):
        members = dict(reader.decode(body, {}, model.tensor_kinds, LIMITS).members)
        slowly = parse_strictly(body)
        assert set(members) == set(slowly)
        for name, value in members.items():
            if isinstance(value, np.ndarray) and isinstance(slowly[name], list) and value.dtype.kind == "f" and name != "bias":
                np.testing.assert_array_equal(value, np.array(slowly[name], np.float64))
        validate(model, members)


def check_safetensors(body: bytes) -> None:
    with suppress(RequestError):
        tensors, _ = safetensors.read_tensors(body)
        with suppress(SafetensorError, KeyError, AttributeError, TypeError):  # dtypes that the library has no NumPy name for
            for name, array in load(body).items():
                assert array.shape == tensors[name].shape
                assert array.tobytes() == tensors[name].tobytes()
        validate(AttendRequest, safetensors.decode(body, {}, AttendRequest.tensor_kinds, LIMITS).members)


def check_v2(body: bytes) -> None:
    """The first two bytes give the number of bytes of tensors at the end."""
    behind, body = int.from_bytes(body[:2], "little"), body[2:]
    size = len(body) if behind == BYTES_ALONE else len(body) - behind
    parameters = {"model": "default", "header_length": "" if behind == BYTES_ALONE else str(size)}
    with suppress(RequestError):
        members = dict(CODEC.decode(body, parameters, AttendRequest.tensor_kinds, LIMITS).members)
        head, rest = parse_strictly(body[:size]), body[size:]
        for entry in head["inputs"]:
            array, dtype = members[entry["name"]], DATATYPES[entry["datatype"]].numpy
            if "data" in entry:
                kind = int if dtype.kind in "iu" else float  # a float has 53 bits of precision, too few for integers of 64 bits
                want = np.array([kind(number) for number in _flat(entry["data"])], None if kind is float else dtype).astype(dtype)
            else:
                taken = entry["parameters"]["binary_data_size"]
                want, rest = np.frombuffer(rest[:taken], dtype), rest[taken:]
            if isinstance(array, np.ndarray):  # otherwise it is not a tensor, and `validate` refuses it
                assert array.dtype == dtype and array.size == np.prod(entry["shape"], dtype=np.int64)
                assert array.tobytes() == want.tobytes()
        assert not rest
        validate(AttendRequest, members)


def _flat(data: Any) -> list[Any]:
    return [number for item in data for number in _flat(item)] if isinstance(data, list) else [data]


def check_gzip(body: bytes) -> None:
    with suppress(RequestError):
        assert unpack(body, "gzip", LIMITS.max_body_bytes) == (gzip.decompress(body) if body else b"")


def check_deflate(body: bytes) -> None:
    with suppress(RequestError):
        unpacked = unpack(body, "deflate", LIMITS.max_body_bytes)
        stream = zlib.decompressobj()
        assert not body or unpacked.startswith(stream.decompress(body))


TARGETS = {
    "json": check_json,
    "layer": check_layer,
    "safetensors": check_safetensors,
    "v2": check_v2,
    "gzip": check_gzip,
    "deflate": check_deflate,
}
