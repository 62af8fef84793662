"""The product of a projection: exact, and the same for a row whatever rows are beside it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_whole import call_of, make

from service.attention import products
from service.attention.masks import Masks
from service.attention.products import NARROW, Product, is_steady, measure, takes_onednn
from service.attention.whole import OUTPUTS


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been measured yet, and nothing that is stays so."""
    monkeypatch.setattr(products, "_taken", {})


def weight_of(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(7, 5), (131, NARROW), (127, NARROW + 1), (257, 509)])
@pytest.mark.parametrize("shape", [(1,), (13,), (3, 5), (2, 0), (0, 4), (300,)])
@torch.inference_mode()
def test_a_product_is_that_of_a_float64_reference(shape: tuple[int, ...], outputs: int, inputs: int, bias: bool) -> None:
    weight = weight_of(outputs, inputs)
    added = weight_of(1, outputs)[0] if bias else None
    x = weight_of(max(1, torch.Size(shape).numel()), inputs)[: torch.Size(shape).numel()].reshape(*shape, inputs)
    measure(weight)
    got = Product(weight, added)(x)
    wanted = x.double() @ weight.double().T + (0 if added is None else added.double())
    sizes = x.abs().double() @ weight.abs().double().T + 1
    assert got.shape == (*shape, outputs)
    assert bool(((got - wanted).abs() <= inputs * torch.finfo(torch.float32).eps * sizes).all())


@pytest.mark.parametrize("number", [1, 2])
@torch.inference_mode()
def test_long_sums_are_the_same_whatever_rows_are_beside_them(number: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        weight, x = weight_of(311, 769), weight_of(400, 769)
        measure(weight)
        assert takes_onednn(weight), "this torch has no product of oneDNN's, or it is slow"
        product = Product(weight, None)
        whole = product(x)
        for rows in (1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 129, 399):
            assert torch.equal(product(x[:rows]), whole[:rows]), rows
            assert torch.equal(product(x[-rows:]), whole[-rows:]), rows
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("outputs", [1, 24, 33])
def test_a_weight_with_few_outputs_is_measured_by_its_arithmetic(outputs: int) -> None:
    """Not by what is around it, which would make every such layer's calls run alone."""
    weight = weight_of(outputs, 192)
    measure(weight)
    assert is_steady(weight)


@torch.inference_mode()
def test_few_numbers_of_rows_are_met_for_which_code_is_made_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    met: set[int] = set()
    onednn = products._onednn

    def watched(x: torch.Tensor, *more: Any) -> torch.Tensor:
        met.add(len(x))
        return onednn(x, *more)

    weight = weight_of(131, 137)
    measure(weight)
    product = Product(weight, None)
    monkeypatch.setattr(products, "_onednn", watched)
    for rows in range(1, 1025):
        assert product(torch.ones(rows, 137)).shape == (rows, 131)
    assert len(met) < 50
    assert max(met) == 1024


def test_gradients_go_through_it() -> None:
    """oneDNN's operation knows none."""
    weight = weight_of(3, NARROW + 1)
    measure(weight)
    x = torch.ones(2, NARROW + 1, requires_grad=True)
    Product(weight, None)(x).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert torch.allclose(x.grad, weight.sum(0).expand(2, -1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_numbers_than_float32_are_left_to_torch(dtype: torch.dtype) -> None:
    weight = weight_of(300, 300, dtype)
    measure(weight)
    assert not takes_onednn(weight)
    assert is_steady(weight)
    x = weight_of(5, 300, dtype)
    assert torch.equal(Product(weight, None)(x), torch.nn.functional.linear(x, weight))


@torch.inference_mode()
def test_what_is_too_heavy_is_not_held_twice_and_as_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "HEAVY", 300 * 769)
    for outputs, light in ((300, True), (301, False)):
        weight, x = weight_of(outputs, 769), weight_of(100, 769)
        measure(weight)
        assert is_steady(weight)
        product = Product(weight, None)
        assert (product._laid_out is weight) is not light
        assert all(torch.equal(product(x[:rows]), product(x)[:rows]) for rows in (1, 2, 3, 9, 33))


@torch.inference_mode()
def test_a_reproducible_call_takes_torchs_own_whatever_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers may have measured differently; their bits are to be the same."""
    layer, plain = make(d_model=160, num_heads=2)
    assert layer.projections.are_steady
    monkeypatch.setattr(products, "_onednn", None)
    for outputs in (OUTPUTS, frozenset({"query_projection", "value_projection", "output"})):
        for call in (call_of(layer, 2, 7, outputs=outputs), replace(call_of(layer, 2, 7, outputs=outputs), masks=causal(7))):
            for shared in (call, replace(call, value=call.key), replace(call, key=call.query, value=call.query)):
                got, wanted = (one(replace(shared, reproducible=True)).tensors for one in (layer, plain))
                assert all(torch.equal(got[name], wanted[name]) for name in outputs)


def causal(rows: int) -> Masks:
    return Masks(torch.arange(rows)[None], rows, right=0, aligned=True)


def lacking(*_: Any) -> Any:
    raise AttributeError("_linear_pointwise")


def refusing(*_: Any) -> Any:
    raise RuntimeError("not with these arguments")


@pytest.mark.parametrize("operation", [lacking, refusing])
@pytest.mark.parametrize("name", ["_lay_out", "_onednn"])
def test_where_torch_lacks_it_the_product_is_torchs_own(name: str, operation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, name, operation)
    weight, x = weight_of(200, 200), weight_of(3, 200)
    measure(weight)
    assert not is_steady(weight)
    assert torch.equal(Product(weight, None)(x), torch.nn.functional.linear(x, weight))


def test_a_slow_one_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_seconds", lambda product, x, weight: 1.0 if product is torch.nn.functional.linear else 5.0)
    weight = weight_of(200, 200)
    measure(weight)
    assert not takes_onednn(weight)
