"""Products of projections are exact with torch's product and with oneDNN's. The tests choose which one is used, and replace its two
operations of torch where they watch them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attend.attention import linear
from attend.attention.linear import MIN_INPUTS, Linear, has_onednn, suits_onednn

REORDER, PRODUCT = "_reorder_linear_weight", "_linear_pointwise"  # oneDNN's operations, of torch.ops.mkldnn


def replace_onednn(
    patch: pytest.MonkeyPatch, reorder: Callable[..., Any] = torch.clone, product: Callable[..., Any] = torch.nn.functional.linear
) -> None:
    """Replace oneDNN's operations by functions of a weight, and of x, weight and bias."""
    patch.setattr(torch.ops.mkldnn, REORDER, lambda weight, rows: reorder(weight), raising=False)
    patch.setattr(torch.ops.mkldnn, PRODUCT, lambda x, weight, bias, *_: product(x, weight, bias), raising=False)


@pytest.fixture(params=["F.linear", "oneDNN"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """torch's product and oneDNN's, for every weight; a substitute for oneDNN's if this torch has none."""
    name: str = request.param
    if name == "oneDNN" and not has_onednn():
        replace_onednn(monkeypatch)
    monkeypatch.setattr(linear, "has_onednn", lambda: name == "oneDNN")
    return name


def weight_of(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(7, 5), (131, MIN_INPUTS - 1), (127, MIN_INPUTS), (257, 509)])
@pytest.mark.parametrize("shape", [(1,), (13,), (3, 5), (2, 0), (0, 4), (300,)])
@pytest.mark.usefixtures("product")
@torch.inference_mode()
def test_products_agree_with_float64(shape: tuple[int, ...], outputs: int, inputs: int, bias: bool) -> None:
    weight = weight_of(outputs, inputs)
    added = weight_of(1, outputs)[0] if bias else None
    x = weight_of(max(1, torch.Size(shape).numel()), inputs)[: torch.Size(shape).numel()].reshape(*shape, inputs)
    got = Linear(weight, added)(x)
    wanted = x.double() @ weight.double().T + (0 if added is None else added.double())
    sizes = x.abs().double() @ weight.abs().double().T + 1
    assert got.shape == (*shape, outputs)
    assert bool(((got - wanted).abs() <= inputs * torch.finfo(torch.float32).eps * sizes).all())


@pytest.fixture
def onednn_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each product that is passed to oneDNN's operation, which is replaced."""
    rows: list[int] = []

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows.append(len(x))
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(linear, "has_onednn", lambda: True)
    replace_onednn(monkeypatch, product=product)
    return rows


@torch.inference_mode()
def test_onednn_products_have_few_different_numbers_of_rows(onednn_rows: list[int]) -> None:
    product = Linear(weight_of(131, 137), None)
    for rows in range(1, 1025):
        assert product(torch.ones(rows, 137)).shape == (rows, 131)
    assert len(set(onednn_rows)) < 50
    assert max(onednn_rows) == 1024
    assert len(onednn_rows) == 1023  # `F.linear` for one row


def test_gradients_are_computed_by_torch(onednn_rows: list[int]) -> None:
    """oneDNN's operation has no gradient."""
    weight = weight_of(3, MIN_INPUTS)
    x = torch.ones(2, MIN_INPUTS, requires_grad=True)
    Linear(weight, None)(x).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert torch.allclose(x.grad, weight.sum(0).expand(2, -1))
    assert not onednn_rows


@pytest.mark.parametrize(
    ("dtype", "inputs"), [(torch.float64, 300), (torch.bfloat16, 300), (torch.float16, 300), (torch.float32, MIN_INPUTS - 1)]
)
@torch.inference_mode()
def test_torch_computes_other_datatypes_and_narrow_inputs(dtype: torch.dtype, inputs: int, onednn_rows: list[int]) -> None:
    weight, x = weight_of(300, inputs, dtype), weight_of(5, inputs, dtype)
    assert not suits_onednn(weight)
    assert torch.equal(Linear(weight, None)(x), torch.nn.functional.linear(x, weight))
    assert not onednn_rows


@torch.inference_mode()
def test_large_weights_are_not_stored_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[torch.Tensor] = []
    replace_onednn(monkeypatch, product=lambda x, weight, _: passed.append(weight) or x @ weight.T)
    monkeypatch.setattr(linear, "has_onednn", lambda: True)
    monkeypatch.setattr(linear, "MAX_REORDERED", 300 * 769)
    for outputs, is_stored_twice in ((300, True), (301, False)):
        weight = weight_of(outputs, 769)
        Linear(weight, None)(torch.ones(8, 769))
        assert (passed.pop() is not weight) is is_stored_twice


def lacking(*_: Any) -> Any:
    raise AttributeError(PRODUCT)


def refusing(*_: Any) -> Any:
    raise RuntimeError("not with these arguments")


@pytest.mark.parametrize("operation", [lacking, refusing])
@pytest.mark.parametrize("name", [REORDER, PRODUCT])
def test_without_the_onednn_operation_torch_computes_the_product(
    name: str, operation: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_onednn(monkeypatch)
    monkeypatch.setattr(torch.ops.mkldnn, name, operation)
    assert not has_onednn.__wrapped__()
    monkeypatch.setattr(linear, "has_onednn", has_onednn.__wrapped__)
    weight, x = weight_of(200, 200), weight_of(3, 200)
    assert torch.equal(Linear(weight, None)(x), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize(("capability", "fast"), [("DEFAULT", False), ("AVX2", True), ("AVX512", True), ("SVE256", False)])
def test_onednn_is_used_on_processors_with_avx2_or_avx512(capability: str, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_onednn(monkeypatch)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert has_onednn.__wrapped__() is fast
