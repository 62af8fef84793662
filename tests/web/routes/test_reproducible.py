"""`reproducible`: the operands of every product start at a multiple of 64 bytes, however the request is sent.

Libraries may sum in another order, and so round otherwise, if they do not. Whether they do depends on the processor; where operands
start does not.
"""

import json
import socket
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import save
from torch.utils._python_dispatch import TorchDispatchMode
from tritonclient.grpc import service_pb2

from attend.serving import executor
from attend.settings import Settings
from support.app import serve_here
from support.grpc_calls import SERVICE, entry, request
from support.v2 import in_bytes, in_json

RNG = np.random.default_rng(64)
Array = np.ndarray[Any, Any]
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "_linear_pointwise", "_scaled_dot_product")  # parts of names of operations
QUERY = RNG.standard_normal((2, 5, 160)).astype(np.float32)
KEY = RNG.standard_normal((2, 7, 160)).astype(np.float32)
EIGHT_ROWS = QUERY[:, :4].copy()  # which oneDNN's product takes as they are: it pads other numbers of rows
GRADIENT = RNG.standard_normal((2, 5, 160)).astype(np.float32)
LAYERS = {
    "plain": {"d_model": 160, "num_heads": 5, "seed": 1},
    "bare": {"d_model": 160, "num_heads": 5, "projections": False},
    "exact": {"d_model": 160, "num_heads": 5, "seed": 1, "dtype": "float64"},
    "gated": {"d_model": 160, "num_heads": 5, "seed": 1, "output_gate": {}},
}
SHIFTS = range(8)  # lengths of the texts before the numbers, which move them in memory


class Products(TorchDispatchMode):
    """Records where the memory of each operand of each product starts, in bytes after a multiple of 64.

    It is the memory that an operand is a view of: where a view starts in it depends only on the shapes of the call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.starts: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if any(name in function.overloadpacket.__name__ for name in PRODUCTS):
            operands = [x for x in args if isinstance(x, torch.Tensor) and x.layout == torch.strided and x.numel() and not x.is_mkldnn]
            self.starts += [x.untyped_storage().data_ptr() % 64 for x in operands]
        return function(*args, **(kwargs or {}))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Products:
    """The products of the reproducible calls of this test."""
    recorder, real = Products(), executor.one_core

    class Recording:
        def submit(self, compute: Callable[..., Any], *args: Any) -> Future[Any]:
            def recorded() -> Any:
                with recorder:
                    return compute(*args)

            return real().submit(recorded)

    monkeypatch.setattr(executor, "one_core", Recording)
    return recorder


@pytest.fixture(scope="module")
def grpc_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def here(grpc_port: int) -> Iterator[httpx.Client]:
    settings = Settings(access_log=False, layers=LAYERS, grpc_port=grpc_port, session_memory=1 << 24)
    with serve_here(settings) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http


def in_base64(x: Array) -> dict[str, Any]:
    return {"shape": x.shape, "datatype": "FP32", "base64": b64encode(x.tobytes()).decode()}


def as_safetensors(tensors: Mapping[str, Array], members: Mapping[str, Any]) -> dict[str, Any]:
    return {"content": save(dict(tensors), {"request": json.dumps(members)}), "headers": {"Content-Type": "application/vnd.safetensors"}}


FORMS: dict[str, Callable[[dict[str, Array], dict[str, Any]], dict[str, Any]]] = {
    "lists": lambda tensors, members: {"json": {**members, **{name: x.tolist() for name, x in tensors.items()}}},
    "flat lists": lambda tensors, members: {
        "json": {**members, **{name: {"shape": x.shape, "data": x.ravel().tolist()} for name, x in tensors.items()}}
    },
    "base64": lambda tensors, members: {"json": {**members, **{name: in_base64(x) for name, x in tensors.items()}}},
    "safetensors": as_safetensors,
}


def assert_aligned(products: Products) -> None:
    assert products.starts
    assert set(products.starts) == {0}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("form", FORMS)
def test_operands_are_aligned(here: httpx.Client, products: Products, form: str, layer: str) -> None:
    """In calls for weights, for the output alone and for gradients. The digits of `scale` move the numbers in memory."""
    for shift in SHIFTS:
        for tensors, members in (
            ({"query": QUERY}, {}),
            ({"query": QUERY, "key": KEY}, {"outputs": ["output"]}),
            ({"query": QUERY, "key": KEY, "output_gradient": GRADIENT}, {"outputs": ["query_gradient", "key_gradient"]}),
        ):
            common = {"reproducible": True, "layer": layer, "scale": float("0.5" + "0" * shift + "1")}
            answer = here.post("/attend", **FORMS[form](tensors, {**common, **members}))
            assert answer.status_code == 200, answer.text
    assert_aligned(products)


@pytest.mark.parametrize("form", ["lists", "safetensors"])
def test_operands_of_session_steps_are_aligned(here: httpx.Client, products: Products, form: str) -> None:
    for shift in SHIFTS:
        session = here.post("/sessions", json={"layer": "plain"}).json()["id"]
        for rows in (QUERY[0, :4], QUERY[0, 4:]):
            members = {"reproducible": True, "scale": float("0.5" + "0" * shift + "1")}
            answer = here.post(f"/sessions/{session}/attend", **FORMS[form]({"query": rows}, members))
            assert answer.status_code == 200, answer.text
    assert_aligned(products)


@pytest.mark.parametrize("binary", [False, True])
def test_operands_of_the_open_inference_protocol_are_aligned(here: httpx.Client, products: Products, binary: bool) -> None:
    for shift in SHIFTS:
        members: dict[str, Any] = {"id": "x" * shift, "parameters": {"reproducible": True}}
        if binary:
            content, headers = in_bytes(members, query=EIGHT_ROWS)
            answer = here.post("/v2/models/plain/infer", content=content, headers=headers)
        else:
            answer = here.post("/v2/models/plain/infer", json={**members, "inputs": in_json(query=EIGHT_ROWS)})
        assert answer.status_code == 200, answer.text
    assert_aligned(products)


@pytest.mark.parametrize("raw", [False, True])
def test_operands_over_grpc_are_aligned(here: httpx.Client, grpc_port: int, products: Products, raw: bool) -> None:
    shape = list(EIGHT_ROWS.shape)
    members: dict[str, Any] = {"parameters": {"reproducible": service_pb2.InferParameter(bool_param=True)}}
    if raw:
        inputs, members = entry("query", shape), {**members, "raw_input_contents": [EIGHT_ROWS.tobytes()]}
    else:
        inputs = entry("query", shape, fp32_contents=EIGHT_ROWS.ravel().tolist())
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        for shift in SHIFTS:
            infer(request("plain", inputs, id="x" * shift, **members).SerializeToString())
    assert_aligned(products)
