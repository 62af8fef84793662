"""The product of a projection: exact, and tried for whether its rows depend on those beside them. Which product a library or a
measurement chooses is forced here, never assumed.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.layers import call_of, make

from service.attention import linear
from service.attention.linear import NARROW, Linear, is_batch_invariant, measure, takes_onednn
from service.attention.masks import Masks
from service.attention.short import OUTPUTS


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been measured yet, and nothing that is stays so."""
    monkeypatch.setattr(linear, "_taken", {})
    monkeypatch.setattr(linear, "_batch_invariant", {})


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's product is taken for long sums, however slow; where this torch has none, one in its place."""
    monkeypatch.setattr(linear, "_is_fast", lambda weight: True)
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        monkeypatch.setattr(linear, "_lay_out", lambda weight: weight if weight.numel() > linear.HEAVY else weight.clone())
        monkeypatch.setattr(linear, "_onednn", torch.nn.functional.linear)


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
    got = Linear(weight, added)(x)
    wanted = x.double() @ weight.double().T + (0 if added is None else added.double())
    sizes = x.abs().double() @ weight.abs().double().T + 1
    assert got.shape == (*shape, outputs)
    assert bool(((got - wanted).abs() <= inputs * torch.finfo(torch.float32).eps * sizes).all())


def crooked(size: float) -> Any:
    """A product whose rows depend on how many there are: by `size` of each number, up to 16 rows."""
    return lambda x, weight, bias: torch.nn.functional.linear(x, weight, bias) * (1 + (size if len(x) <= 16 else 0))


@pytest.mark.parametrize(("size", "steady"), [(0.0, True), (1e-7, True), (2e-6, False), (0.1, False)])
@pytest.mark.parametrize("shape", [(129, 129), (16, 1500), (1500, 200)], ids=str)
def test_a_product_whose_rows_depend_on_those_beside_them_is_found_out(
    shape: tuple[int, int], size: float, steady: bool, onednn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a processor's library does: the numbers decide. The product below sums in float64, so that this library's do not matter."""
    exact = lambda x, weight, bias: crooked(size)(x.double(), weight.double(), bias).float()  # noqa: E731
    monkeypatch.setattr(linear, "_lay_out", lambda weight: weight)
    monkeypatch.setattr(linear, "_onednn", exact)
    weight = weight_of(*shape)
    assert not is_batch_invariant(weight), "not yet chosen"
    measure(weight)
    assert is_batch_invariant(weight) is steady


def test_torchs_own_product_of_long_sums_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_is_fast", lambda weight: False)
    weight = weight_of(200, NARROW + 1)
    measure(weight)
    assert not is_batch_invariant(weight)


@pytest.mark.parametrize("outputs", [1, 24, 33])
def test_a_weight_with_few_outputs_is_measured_by_its_arithmetic(outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by what is around it, which would make every such layer's calls run alone."""
    met: list[int] = []
    monkeypatch.setattr(linear, "_seconds", lambda product, x, weight: met.append(len(x)) or 1.0)
    measure(weight_of(outputs, 192))
    assert all(rows * outputs * 192 > 1 << 23 for rows in met)


@torch.inference_mode()
def test_few_numbers_of_rows_are_met_for_which_code_is_made_and_kept(onednn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    met: set[int] = set()
    product_of_onednn = linear._onednn

    def watched(x: torch.Tensor, *more: Any) -> torch.Tensor:
        met.add(len(x))
        return product_of_onednn(x, *more)

    weight = weight_of(131, 137)
    measure(weight)
    product = Linear(weight, None)
    monkeypatch.setattr(linear, "_onednn", watched)
    for rows in range(1, 1025):
        assert product(torch.ones(rows, 137)).shape == (rows, 131)
    assert len(met) < 50
    assert max(met) == 1024


def test_gradients_go_through_it(onednn: None) -> None:
    """oneDNN's operation knows none."""
    weight = weight_of(3, NARROW + 1)
    measure(weight)
    x = torch.ones(2, NARROW + 1, requires_grad=True)
    Linear(weight, None)(x).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert torch.allclose(x.grad, weight.sum(0).expand(2, -1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_numbers_than_float32_are_left_to_torch(dtype: torch.dtype) -> None:
    weight = weight_of(300, 300, dtype)
    measure(weight)
    assert not takes_onednn(weight)
    assert is_batch_invariant(weight)
    x = weight_of(5, 300, dtype)
    assert torch.equal(Linear(weight, None)(x), torch.nn.functional.linear(x, weight))


@torch.inference_mode()
def test_what_is_too_heavy_is_not_held_twice(onednn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "HEAVY", 300 * 769)
    for outputs, is_light in ((300, True), (301, False)):
        weight, x = weight_of(outputs, 769), weight_of(100, 769)
        measure(weight)
        product = Linear(weight, None)
        assert (product._laid_out is weight) is not is_light
        wanted = x.double() @ weight.double().T
        assert float((product(x) - wanted).abs().max() / wanted.abs().max()) < 1e-5


@torch.inference_mode()
def test_a_reproducible_call_takes_torchs_own_whatever_was_measured(onednn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers may have measured differently; their bits are to be the same. The product that was measured here gives others."""
    monkeypatch.setattr(linear, "_lay_out", lambda weight: weight)
    monkeypatch.setattr(linear, "_onednn", lambda x, weight, bias: torch.nn.functional.linear(x, weight, bias) * 1.001)
    layer, plain = make(d_model=160, num_heads=2)
    for name in ("query", "key", "value", "output", "key+value", "query+key+value"):
        layer.projections.product(torch.ones(1, 160), name)
    monkeypatch.setattr(linear, "_is_fast", lambda weight: False)
    monkeypatch.setattr(linear, "_taken", {})
    plain.tune()
    for outputs in (OUTPUTS, frozenset({"query_projection", "value_projection", "output"})):
        for call in (call_of(layer, 2, 7, outputs=outputs), replace(call_of(layer, 2, 7, outputs=outputs), masks=causal(7))):
            for shared in (call, replace(call, key=call.query.clone()), replace(call, value=call.query.clone())):
                got, wanted = (one.forward(replace(shared, reproducible=True)).tensors for one in (layer, plain))
                assert all(torch.equal(got[name], wanted[name]) for name in outputs)
                ignored = layer.forward(shared).tensors
                assert not all(torch.equal(ignored[name], wanted[name]) for name in outputs), "nothing would show that it was heard"


def causal(rows: int) -> Masks:
    return Masks(torch.arange(rows)[None], rows, right=0, aligned=True)


def lacking(*_: Any) -> Any:
    raise AttributeError("_linear_pointwise")


def refusing(*_: Any) -> Any:
    raise RuntimeError("not with these arguments")


@pytest.mark.parametrize("operation", [lacking, refusing])
@pytest.mark.parametrize("name", ["_lay_out", "_onednn"])
def test_where_torch_lacks_it_the_product_is_torchs_own(name: str, operation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, name, operation)
    weight, x = weight_of(200, 200), weight_of(3, 200)
    measure(weight)
    assert not is_batch_invariant(weight)
    assert torch.equal(Linear(weight, None)(x), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize(("onednn_takes", "taken"), [(0.5, True), (3.9, True), (5.0, False)])
def test_a_slow_one_is_not_taken(onednn_takes: float, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_lay_out", lambda weight: weight)
    monkeypatch.setattr(linear, "_seconds", lambda product, x, weight: 1.0 if product is torch.nn.functional.linear else onednn_takes)
    weight = weight_of(200, 200)
    measure(weight)
    assert takes_onednn(weight) is taken
