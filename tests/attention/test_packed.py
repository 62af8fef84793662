"""Short calls of any lengths together: the same numbers as each by itself, with one product for all at each projection."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.layers import TOLERANCE, call_of, make

from service.attention import packed, whole
from service.attention.call import Call, Result
from service.attention.linear import Linear
from service.attention.whole import OUTPUTS, ROWS


def distance(got: Result, wanted: Result) -> float:
    assert got.tensors.keys() == wanted.tensors.keys()
    assert all(got.tensors[name].shape == tensor.shape for name, tensor in wanted.tensors.items())
    return max(float((got.tensors[name] - tensor).abs().max() / tensor.abs().max()) for name, tensor in wanted.tensors.items())


def shared(call: Call, how: str) -> Call:
    """The call with one input for all, one for keys and values, or as it is."""
    key = call.query if how == "all" else call.key
    return replace(call, key=key, value=call.value if how == "none" else key)


@given(
    heads=st.sampled_from([1, 2, 3, 5, 8]),
    width=st.sampled_from([1, 2, 3, 7, 8, 16]),
    shapes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, ROWS)), min_size=2, max_size=7),
    dtype=st.sampled_from(["float32", "float64"]),
    outputs=st.sampled_from([OUTPUTS, frozenset({"output"}), frozenset({"attention_weights"})]),
    how=st.sampled_from(["all", "two", "none"]),
)
def test_each_gets_what_the_long_way_gives_it_alone(
    heads: int, width: int, shapes: list[tuple[int, int]], dtype: str, outputs: frozenset[str], how: str
) -> None:
    layer, plain = make(d_model=heads * width, num_heads=heads, dtype=dtype, seed=len(shapes), init="torch_mha")
    calls = [shared(call_of(layer, *shape, seed=i, outputs=outputs), how) for i, shape in enumerate(shapes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole, "WORTH", 0)
        for call, got in zip(calls, layer.together(calls), strict=True):
            assert distance(got, plain(call)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("size", [1.0, 15.0, 200.0])
def test_scores_of_any_size(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With scores below and far above those whose exponentials can be added up as they are: weights are exact to the scores' rounding."""
    monkeypatch.setattr(whole, "WORTH", 0)
    layer, _ = make(d_model=15, num_heads=3, dtype="float32", seed=5)
    exact, _ = make(d_model=15, num_heads=3, dtype="float64", seed=5)
    calls = [call_of(layer, 1, rows, seed=rows) for rows in (7, 3, 50)]
    for call in calls:
        call.query.mul_(size)
    for call, got in zip(calls, layer.together(calls), strict=True):
        wanted = exact(
            Call(*(x.double() for x in (call.query, call.key, call.value)), call.masks, call.scale, frozenset({"scores", *OUTPUTS}))
        )
        rounding = max(1.0, float(wanted.tensors["scores"].abs().max())) * torch.finfo(torch.float32).eps
        assert float((got.tensors["attention_weights"] - wanted.tensors["attention_weights"]).abs().max()) <= 8 * rounding


def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many rows each product is from here on."""
    seen: list[int] = []
    product = Linear.__call__

    def counted(self: Linear, x: torch.Tensor, fixed: bool = False) -> torch.Tensor:
        seen.append(x.numel() // x.shape[-1])
        return product(self, x, fixed)

    monkeypatch.setattr(Linear, "__call__", counted)
    return seen


@pytest.mark.parametrize(("how", "inputs"), [("all", 1), ("none", 3)])
@pytest.mark.parametrize("outputs", [OUTPUTS, OUTPUTS | {"scores"}], ids=["short cut", "long way"])
def test_all_rows_share_a_product(outputs: frozenset[str], how: str, inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the inputs where they are the same, else one for each; and one for the outputs."""
    layer, _ = make(d_model=512, num_heads=8)
    calls = [shared(call_of(layer, *shape, outputs=outputs), how) for shape in ((1, 5), (2, 3), (1, 40))]
    seen = products(monkeypatch)
    layer.together(calls)
    assert seen == [51] * (inputs + 1)


def test_few_calls_to_a_narrow_layer_go_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their weights are at hand anyway."""
    layer, _ = make(d_model=64, num_heads=8)
    calls = [call_of(layer, 1, rows) for rows in range(2, 18)]
    seen = products(monkeypatch)
    together = layer.together(calls[:15])
    assert seen == []
    assert len(layer.together(calls)) == 16
    assert len(seen) == 4
    assert all(torch.equal(got.tensors["output"], layer(call).tensors["output"]) for call, got in zip(calls, together, strict=False))


def test_what_overflows_overflows_for_its_own_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "WORTH", 0)
    layer, _ = make(d_model=6, num_heads=3)
    calls = [call_of(layer, 1, rows, seed=rows) for rows in (4, 60, 5)]
    assert 3 * 5**2 < packed.SCORES < 3 * 60**2  # attended in NumPy and in torch
    for i in (0, 1):
        calls[i].query.mul_(1e30)
        calls[i].key.mul_(1e30)
    results = layer.together(calls)
    for call, got in zip(calls, results, strict=True):
        for name in OUTPUTS:
            assert torch.equal(got.tensors[name].isfinite(), layer(call).tensors[name].isfinite())
    assert all(tensor.isfinite().all() for tensor in results[2].tensors.values())
