"""Short calls: the same numbers as the general path gives, alone and in a batch, and only for calls that ask for nothing else."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.layers import TOLERANCE, call_of, make, rows_masks

from service.attention.call import Call
from service.attention.layer import MultiHeadAttention
from service.attention.linear import Linear
from service.attention.short import OUTPUTS, PRODUCT, ROWS


def self_attention(query: torch.Tensor, call: Call) -> Call:
    return replace(call, query=query, key=query, value=query)


def is_short(layer: MultiHeadAttention, call: Call) -> bool:
    return layer.short is not None and layer.short.suits(call)


def distance(layer: MultiHeadAttention, plain: MultiHeadAttention, *calls: Call) -> float:
    """The largest difference relative to the largest value of a tensor, of the calls in one batch from each by itself."""
    distances = []
    for call, result in zip(calls, layer.forward_batch(calls), strict=True):
        got, wanted = result.tensors, plain.forward(call).tensors
        assert got.keys() == wanted.keys()
        assert all(got[name].shape == wanted[name].shape for name in got)
        distances += [float((got[name] - wanted[name]).abs().max() / wanted[name].abs().max()) for name in got]
    return max(distances)


@given(
    heads=st.sampled_from([1, 2, 3, 5, 8]),
    width=st.sampled_from([1, 2, 3, 7, 8, 16]),
    shapes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, ROWS)), min_size=1, max_size=7),
    dtype=st.sampled_from(["float32", "float64"]),
    outputs=st.sampled_from([OUTPUTS, frozenset({"output"}), frozenset({"attention_weights"})]),
    inputs=st.integers(1, 3),
)
def test_the_numbers_are_those_of_the_general_path(
    heads: int, width: int, shapes: list[tuple[int, int]], dtype: str, outputs: frozenset[str], inputs: int
) -> None:
    """With one input for query, key and value, one for key and value, or three."""
    layer, plain = make(d_model=heads * width, num_heads=heads, dtype=dtype, seed=len(shapes), init="torch_mha")
    calls = [call_of(layer, *shape, seed=i, outputs=outputs) for i, shape in enumerate(shapes)]
    if inputs > 1:
        keys = [call.query.flip(1) for call in calls]
        calls = [replace(call, key=key, value=key if inputs == 2 else key + 1) for call, key in zip(calls, keys, strict=True)]
    assert all(is_short(layer, call) for call in calls)
    assert distance(layer, plain, *calls) <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    "select",
    [
        {"heads": (2, 0)},
        {"queries": (4, 0)},
        {"average": True},
        {"heads": (1,), "queries": (6,), "average": True},
        {"heads": (2,), "top_k": 2},
    ],
    ids=str,
)
def test_selected_weights_are_those_of_the_whole_call(select: dict[str, Any]) -> None:
    layer, plain = make(d_model=6, num_heads=3)
    call = call_of(layer, 2, 7)
    selected = replace(call, **select)
    assert is_short(layer, selected)
    assert distance(layer, plain, selected) <= TOLERANCE["float32"]
    heads, queries = list(select.get("heads", range(3))), list(select.get("queries", range(7)))
    wanted = layer.forward(call).tensors["attention_weights"][:, heads][:, :, queries]
    got = layer.forward(selected).tensors
    if "top_k" in select:
        assert torch.equal(got["values"], wanted.gather(-1, got["keys"]))
        assert torch.equal(got["keys"], wanted.argsort(dim=-1, descending=True, stable=True)[..., :2])
    else:
        assert torch.equal(got["attention_weights"], wanted.mean(1) if "average" in select else wanted)


@pytest.mark.parametrize(
    "more",
    [
        {"masks": rows_masks(7, right=0, aligned=True)},
        {"masks": rows_masks(7, left=2)},
        {"masks": rows_masks(7, lengths=torch.tensor([[3], [7]]))},
        {"masks": rows_masks(7, attend_keys=torch.tensor([[True] * 6 + [False]]))},
        {"masks": rows_masks(7, attend_mask=torch.eye(7, dtype=torch.bool)[None, None])},
        {"masks": rows_masks(7, bias=torch.ones(1, 1, 7, 7) * torch.arange(7.0))},
        {"softcap": 0.5},
        {"dropout": (0.5, 3)},
        {"head_scale": torch.tensor([0.0, 1.0, 2.0]).view(1, 3, 1, 1)},
        {"reproducible": True},
        {"outputs": frozenset({"output", "scores"})},
        {"key": torch.ones(2, 5, 6), "value": torch.ones(2, 5, 6), "masks": rows_masks(5)},
    ],
    ids=lambda more: next(iter(more)),
)
def test_calls_that_want_more_take_the_general_path(more: dict[str, Any]) -> None:
    layer, plain = make(d_model=6, num_heads=3)
    call = call_of(layer, 2, 7, **more)
    assert not is_short(layer, call)
    assert distance(layer, plain, call) == 0


@pytest.mark.parametrize(("batch", "rows"), [(1, ROWS + 1), (1, 0), (0, 4)])
def test_calls_that_are_long_or_empty_take_the_general_path(batch: int, rows: int) -> None:
    layer, plain = make(d_model=6, num_heads=3)
    call = call_of(layer, batch, rows)
    assert not is_short(layer, call)
    assert torch.equal(layer.forward(call).tensors["output"], plain.forward(call).tensors["output"])


@pytest.mark.parametrize(("heads", "rows"), [(8, 64), (32, 32), (128, 16)])
def test_many_heads_leave_room_for_few_rows(heads: int, rows: int) -> None:
    layer, _ = make(d_model=128, num_heads=heads)
    assert is_short(layer, call_of(layer, 1, rows))
    assert not is_short(layer, call_of(layer, 1, rows + 1))


@pytest.mark.parametrize(
    "fields",
    [
        {"num_kv_heads": 1},
        {"head_dim": 4},
        {"value_head_dim": 5},
        {"key_dim": 5},
        {"output_dim": 5},
        {"bias": False},
        {"bias": {"query": True, "key": False, "value": True, "output": True}},
        {"projections": False},
        {"rope": {"theta": 100.0}},
        {"alibi": True},
        {"sinks": True},
        {"qk_norm": {"kind": "rms"}},
        {"dtype": "float16"},
        {"d_model": 132},
    ],
    ids=str,
)
def test_other_layers_have_no_short_calls(fields: dict[str, Any]) -> None:
    assert make(**{"d_model": 6, "num_heads": 3, **fields})[0].short is None


def test_an_overflow_reaches_its_own_caller_alone() -> None:
    layer, plain = make(d_model=6, num_heads=3)
    calls = [call_of(layer, 1, rows, seed=rows) for rows in (4, 60, 5)]
    calls[:2] = [self_attention(call.query * 1e30, call) for call in calls[:2]]
    results = layer.forward_batch(calls)
    for call, got in zip(calls, results, strict=True):
        for name in OUTPUTS:
            assert torch.equal(got.tensors[name].isfinite(), plain.forward(call).tensors[name].isfinite())
    assert all(tensor.isfinite().all() for tensor in results[2].tensors.values())


@pytest.mark.parametrize("size", [1.0, 8.0, 15.0, 200.0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_short_calls_of_any_size_agree_with_a_float64_reference(size: float, dtype: str) -> None:
    """With scores below and far above those whose exponentials can be summed as they are."""
    layer, _ = make(d_model=15, num_heads=3, dtype=dtype, seed=5)
    call = call_of(layer, 1, 7, seed=3)
    call = self_attention(call.query * size, call)
    assert is_short(layer, call)
    before = call.query.clone()
    got = layer.forward(call).tensors
    weights = {name: tensor.double() for name, tensor in layer.weights.items()}
    heads = {}
    for name in ("query", "key", "value"):
        x = getattr(call, name)[0].double() @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
        heads[name] = x.view(7, 3, 5).transpose(0, 1)
    scores = heads["query"] @ heads["key"].mT / 5**0.5
    wanted = torch.exp(scores - scores.amax(-1, keepdim=True))
    wanted = wanted / wanted.sum(-1, keepdim=True)
    output = (wanted @ heads["value"]).transpose(0, 1).reshape(7, 15) @ weights["output.weight"].T + weights["output.bias"]
    rounding = max(1.0, float(scores.abs().max())) * torch.finfo(layer.dtype).eps  # of a score, which softmax hands on
    assert float((got["attention_weights"][0].double() - wanted).abs().max()) <= 8 * rounding
    assert float((got["output"][0].double() - output).abs().max()) <= 8 * rounding * max(1.0, float(heads["value"].abs().max()))
    assert torch.equal(before, call.query)


def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each product that torch computes from here on."""
    seen: list[int] = []
    product = Linear.__call__

    def counted(self: Linear, x: torch.Tensor, fixed: bool = False) -> torch.Tensor:
        seen.append(x.numel() // x.shape[-1])
        return product(self, x, fixed)

    monkeypatch.setattr(Linear, "__call__", counted)
    return seen


def test_large_products_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's library would compute them in threads of its own."""
    layer, _ = make(d_model=64, num_heads=8)
    seen = products(monkeypatch)
    most = PRODUCT // (64 * 192)
    layer.forward(call_of(layer, 1, most))
    assert seen == []
    layer.forward(call_of(layer, 1, most + 1))
    assert seen == [most + 1]
    layer.forward_batch([call_of(layer, 1, 40), call_of(layer, 2, 20)])
    assert seen == [most + 1, 80, 80]


@pytest.mark.parametrize(("is_self", "inputs"), [(True, 1), (False, 3)])
def test_all_rows_of_a_batch_share_a_product(is_self: bool, inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the general path: one for the inputs where they are the same, else one for each; and one for the outputs."""
    layer, _ = make(d_model=512, num_heads=8)
    calls = [call_of(layer, *shape) for shape in ((1, 5), (2, 3), (1, 40))]
    calls = calls if is_self else [replace(call, key=call.query.clone(), value=call.query.clone()) for call in calls]
    seen = products(monkeypatch)
    layer.forward_batch(calls)
    assert seen == [51] * (inputs + 1)
