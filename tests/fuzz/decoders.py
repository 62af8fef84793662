"""What must hold of a decoder whatever bytes come: it refuses in the terms of `service.errors`, or reads what a slower reader of another
make reads. `run.py` looks for bytes of which that is not true; `corpus.json` holds of those that it made the few that between them
lead through all the lines and turns that any did.
"""

import gzip
import zlib
from contextlib import suppress
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from service.errors import RequestError
from service.spec import LayerSpec
from service.wire import json_form, safetensors_form
from service.wire.compression import unpack
from service.wire.documents import AttendRequest, PutLayer
from service.wire.limits import WireLimits
from service.wire.refusals import validate
from service.wire.scan import parse_slowly

LIMITS = WireLimits(body_bytes=1 << 20, depth=16)
TOKENS = (
    "shape datatype data base64 heads queries top_k left right p seed -inf end zero FP32 BF16 nested dtype data_offsets request F32 BOOL"
)
WORDS = [*AttendRequest.model_fields, *LayerSpec.model_fields, *TOKENS.split(), "__metadata__", "query.weight"]
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
    "gzip": [gzip.compress(b"attend" * 50), gzip.compress(b"a") + gzip.compress(b"b")],
    "deflate": [zlib.compress(b"attend" * 50)],
}


def hold_json(body: bytes) -> None:
    _document(body, AttendRequest)


def hold_layer(body: bytes) -> None:
    _document(body, PutLayer)


def _document(body: bytes, model: Any) -> None:
    with suppress(RequestError):
        members = json_form.parse(body, model.tensors, LIMITS)
        slowly = parse_slowly(body)
        assert set(members) == set(slowly)
        for name, value in members.items():
            if isinstance(value, np.ndarray) and isinstance(slowly[name], list) and value.dtype.kind == "f" and name != "bias":
                np.testing.assert_array_equal(value, np.array(slowly[name], np.float64))
        validate(model, members)


def hold_safetensors(body: bytes) -> None:
    with suppress(RequestError):
        tensors, _ = safetensors_form.read_tensors(body)
        with suppress(SafetensorError, KeyError, AttributeError, TypeError):  # dtypes that the library has no NumPy name for
            for name, array in load(body).items():
                assert array.shape == tensors[name].shape
                assert array.tobytes() == tensors[name].tobytes()
        validate(AttendRequest, safetensors_form.parse(body, AttendRequest.tensors, LIMITS))


def hold_gzip(body: bytes) -> None:
    with suppress(RequestError):
        assert unpack(body, "gzip", LIMITS.body_bytes) == (gzip.decompress(body) if body else b"")


def hold_deflate(body: bytes) -> None:
    with suppress(RequestError):
        unpacked = unpack(body, "deflate", LIMITS.body_bytes)
        stream = zlib.decompressobj()
        assert not body or unpacked.startswith(stream.decompress(body))


TARGETS = {"json": hold_json, "layer": hold_layer, "safetensors": hold_safetensors, "gzip": hold_gzip, "deflate": hold_deflate}
