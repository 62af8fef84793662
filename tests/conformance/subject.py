"""The server under test, and how requests to its model are made. Plain bytes: a client library would hide what is tested."""

import json
import math
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import httpx
import pytest

FORMATS = {"FP32": "f", "FP64": "d", "INT32": "i", "INT64": "q", "UINT8": "B", "INT8": "b", "BOOL": "?"}
LENGTH = "Inference-Header-Content-Length"


@dataclass
class Subject:
    """A server with one model. `inputs` are ready to be sent, their numbers in JSON."""

    http: httpx.Client
    model: str
    extensions: list[str]
    metadata: dict[str, Any]
    inputs: list[dict[str, Any]]

    @cached_property
    def outputs(self) -> list[str]:
        """The names of the outputs that a reply has by default."""
        return list(outputs_of(self.infer()))

    @property
    def path(self) -> str:
        return f"/v2/models/{self.model}"

    def infer(self, body: dict[str, Any] | bytes | None = None, **headers: str) -> httpx.Response:
        """POST infer; the default body is a valid request."""
        content = body if isinstance(body, bytes) else json.dumps({"inputs": self.inputs} if body is None else body).encode()
        own = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.http.post(f"{self.path}/infer", content=content, headers=own)

    def binary(self, members: dict[str, Any] | None = None, in_json: int = 0) -> tuple[bytes, dict[str, str]]:
        """A request with the numbers after the JSON, but for those of the first `in_json` inputs; and its header."""
        inputs, rest = [], b""
        for i, tensor in enumerate(self.inputs):
            if i < in_json:
                inputs.append(tensor)
                continue
            piece = packed(tensor)
            rest += piece
            described = {name: tensor[name] for name in ("name", "shape", "datatype")}
            inputs.append({**described, "parameters": {"binary_data_size": len(piece)}})
        head = json.dumps({"inputs": inputs, **(members or {})}).encode()
        return head + rest, {LENGTH: str(len(head))}

    def send(self, body: bytes, headers: dict[str, str]) -> httpx.Response:
        return self.http.post(f"{self.path}/infer", content=body, headers=headers)


def packed(tensor: dict[str, Any]) -> bytes:
    """A tensor's bytes: little-endian, row-major, native width."""
    return struct.pack(f"<{len(tensor['data'])}{FORMATS[tensor['datatype']]}", *tensor["data"])


def outputs_of(answer: httpx.Response) -> dict[str, list[float]]:
    """The numbers of each output, in JSON or after it; checks that shapes, sizes and bytes agree."""
    assert answer.status_code == 200, answer.text
    length = answer.headers.get(LENGTH)
    head, rest = (answer.content, b"") if length is None else (answer.content[: int(length)], answer.content[int(length) :])
    numbers: dict[str, list[float]] = {}
    for output in json.loads(head)["outputs"]:
        count = math.prod(output["shape"])
        size = (output.get("parameters") or {}).get("binary_data_size")
        if size is None:
            numbers[output["name"]] = flat(output["data"])
        else:
            numbers[output["name"]] = list(struct.unpack(f"<{count}{FORMATS[output['datatype']]}", rest[:size]))
            rest = rest[size:]
        assert len(numbers[output["name"]]) == count, output["name"]
    assert not rest, "bytes that belong to no output"
    return numbers


def agreed(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(math.isclose(x, y, rel_tol=1e-4, abs_tol=1e-5) for x, y in zip(one, other, strict=True))


def flat(data: Any) -> list[float]:
    return [number for item in data for number in flat(item)] if isinstance(data, list) else [data]


def nested(data: list[float], shape: list[int]) -> Any:
    """The numbers as nested lists of this shape."""
    if len(shape) < 2:
        return data
    step = len(data) // shape[0]
    return [nested(data[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


def skip_if_restricted(answer: httpx.Response) -> None:
    if answer.status_code == 403:
        pytest.skip(f"{answer.url.path} is restricted")


def refusal_of(answer: httpx.Response) -> str:
    """The text of a refusal: a 4xx or 5xx status and a JSON object with `error`. Skips the test if an operator has restricted the path."""
    skip_if_restricted(answer)
    assert answer.status_code >= 400, (answer.status_code, answer.text[:200])
    words = answer.json()["error"]
    assert isinstance(words, str) and words
    return words
