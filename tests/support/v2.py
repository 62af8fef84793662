"""Makes requests of the Open Inference Protocol without a client library, and reads its replies."""

import json
from dataclasses import dataclass
from typing import Any

import httpx
import ml_dtypes
import numpy as np

LAYERS: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 6, "num_heads": 3, "seed": 7},
    "brain": {"d_model": 6, "num_heads": 3, "seed": 7, "dtype": "bfloat16"},
    "half": {"d_model": 6, "num_heads": 3, "seed": 7, "dtype": "float16"},
    "exact": {"d_model": 6, "num_heads": 3, "seed": 7, "dtype": "float64"},
}
DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    **{f"UINT{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"INT{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    "FP16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "FP32": np.float32,
    "FP64": np.float64,
}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
Array = np.ndarray[Any, Any]


@dataclass
class Reply:
    """A reply of infer: the JSON, and the arrays, of numbers in the JSON or of the bytes after it."""

    document: dict[str, Any]
    arrays: dict[str, Array]
    binary: set[str]


def described(name: str, array: Array, **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": list(array.shape), "datatype": NAMES[array.dtype], **more}


def in_json(**tensors: Any) -> list[dict[str, Any]]:
    """Inputs with their numbers in the JSON."""
    return [described(name, array, data=array.ravel().tolist()) for name, array in tensors.items()]


def in_bytes(members: dict[str, Any] | None = None, **tensors: Array) -> tuple[bytes, dict[str, str]]:
    """A body with all tensors after the JSON, and the header with the length of the JSON."""
    inputs = [described(name, array, parameters={"binary_data_size": array.nbytes}) for name, array in tensors.items()]
    head = json.dumps({"inputs": inputs, **(members or {})}).encode()
    return head + b"".join(array.tobytes() for array in tensors.values()), {"Inference-Header-Content-Length": str(len(head))}


def loads_strictly(text: bytes) -> Any:
    """The document of a JSON text. Fails if it has a bare NaN or infinity, which are not JSON."""

    def fail(word: str) -> Any:
        raise AssertionError(f"a bare {word}")

    return json.loads(text, parse_constant=fail)


def read(answer: httpx.Response) -> Reply:
    """A reply, after checking that every byte belongs to an output."""
    assert answer.status_code == 200, answer.text
    length = answer.headers.get("inference-header-content-length")
    assert answer.headers["content-type"] == ("application/json" if length is None else "application/octet-stream")
    head = answer.content if length is None else answer.content[: int(length)]
    document, rest = loads_strictly(head), b"" if length is None else answer.content[int(length) :]
    arrays, binary = {}, set()
    for output in document["outputs"]:
        dtype = np.dtype(DTYPES[output["datatype"]])
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            array = np.array(output["data"], np.float64).astype(dtype)
        else:
            binary.add(output["name"])
            array, rest = np.frombuffer(rest[:size], dtype), rest[size:]
        arrays[output["name"]] = array.reshape(output["shape"])
    assert not rest
    return Reply(document, arrays, binary)


def refused(answer: httpx.Response, status: int = 400) -> str:
    """Asserts a refusal in the protocol's form. Returns its text."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    document = answer.json()
    assert list(document) == ["error"]
    assert document["error"] and "Traceback" not in document["error"]
    return str(document["error"])
