"""The short cut for short calls: the same numbers as the layer's own way, for no call that it cannot do, and none where torch lacks it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.layers import TOLERANCE, call_of, make

from service.attention.call import Call
from service.attention.layer import MultiHeadAttention
from service.attention.masks import Masks
from service.attention.whole import OUTPUTS, ROWS


def distance(layer: MultiHeadAttention, plain: MultiHeadAttention, call: Call) -> float:
    got, wanted = layer(call).tensors, plain(call).tensors
    assert got.keys() == wanted.keys()
    return max(float((got[name] - wanted[name]).abs().max() / wanted[name].abs().max()) for name in got)


@given(
    heads=st.sampled_from([1, 2, 3, 5, 8]),
    width=st.sampled_from([1, 2, 3, 7, 8, 16]),
    batch=st.integers(1, 5),
    rows=st.integers(1, ROWS),
    dtype=st.sampled_from(["float32", "float64"]),
    outputs=st.sampled_from([OUTPUTS, frozenset({"output"}), frozenset({"attention_weights"})]),
    shared=st.booleans(),
)
def test_its_numbers_are_those_of_the_long_way(
    heads: int, width: int, batch: int, rows: int, dtype: str, outputs: frozenset[str], shared: bool
) -> None:
    layer, plain = make(d_model=heads * width, num_heads=heads, dtype=dtype, seed=rows, init="torch_mha")
    call = call_of(layer, batch, rows, outputs=outputs)
    call = replace(call, key=call.query, value=call.query) if shared else call
    assert layer.whole is not None
    assert layer.whole.takes(call)
    assert distance(layer, plain, call) <= TOLERANCE[dtype]


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
def test_a_selection_is_of_the_very_weights_that_come_without_one(select: dict[str, Any]) -> None:
    layer, plain = make(d_model=6, num_heads=3)
    call = call_of(layer, 2, 7)
    selected = replace(call, **select)
    assert layer.whole is not None
    assert layer.whole.takes(selected)
    assert distance(layer, plain, selected) <= TOLERANCE["float32"]
    heads, queries = list(select.get("heads", range(3))), list(select.get("queries", range(7)))
    wanted = layer(call).tensors["attention_weights"][:, heads][:, :, queries]
    got = layer(selected).tensors
    if "top_k" in select:
        assert torch.equal(got["values"], wanted.gather(-1, got["keys"]))
        assert torch.equal(got["keys"], wanted.argsort(dim=-1, descending=True, stable=True)[..., :2])
    else:
        assert torch.equal(got["attention_weights"], wanted.mean(1) if "average" in select else wanted)


def rows_masks(rows: int, **fields: Any) -> Masks:
    return Masks(torch.arange(rows)[None], rows, **fields)


@pytest.mark.parametrize(
    "more",
    [
        {"masks": rows_masks(7, right=0, aligned=True)},
        {"masks": rows_masks(7, left=2)},
        {"masks": rows_masks(7, lengths=torch.tensor([[3], [7]]))},
        {"masks": rows_masks(7, keys=torch.tensor([[True] * 6 + [False]]))},
        {"masks": rows_masks(7, pairs=torch.eye(7, dtype=torch.bool)[None, None])},
        {"masks": rows_masks(7, bias=torch.ones(1, 1, 7, 7) * torch.arange(7.0))},
        {"scale": 0.1},
        {"softcap": 0.5},
        {"dropout": (0.5, 3)},
        {"head_scale": torch.tensor([0.0, 1.0, 2.0]).view(1, 3, 1, 1)},
        {"reproducible": True},
        {"outputs": frozenset({"output", "scores"})},
    ],
    ids=["causal", "window", "lengths", "keys", "pairs", "bias", "scale", "softcap", "dropout", "head_scale", "reproducible", "outputs"],
)
def test_calls_that_want_more_go_the_long_way(more: dict[str, Any]) -> None:
    layer, plain = make(d_model=6, num_heads=3)
    call = call_of(layer, 2, 7, **more)
    assert layer.whole is not None
    assert not layer.whole.takes(call)
    got, wanted = layer(call).tensors, plain(call).tensors
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in got)


@pytest.mark.parametrize("rows", [(ROWS + 1, ROWS + 1), (3, 5), (0, 0), (0, 4)])
def test_long_calls_and_uneven_ones_go_the_long_way(rows: tuple[int, int]) -> None:
    layer, plain = make(d_model=6, num_heads=3)
    queries, keys = (torch.ones(1, n, 6) for n in rows)
    call = Call(queries, keys, keys, rows_masks(rows[1]), layer.spec.scale, OUTPUTS)
    assert layer.whole is not None
    assert not layer.whole.takes(call)
    assert torch.equal(layer(call).tensors["output"], plain(call).tensors["output"])


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
        {"scale": 1.0},
        {"softcap": 1.0},
        {"window": {"left": 2, "right": 0}},
        {"rope": {"theta": 100.0}},
        {"alibi": True},
        {"sinks": True},
        {"qk_norm": {"kind": "rms"}},
        {"dtype": "float16"},
    ],
    ids=str,
)
def test_layers_of_other_kinds_do_not_have_it(fields: dict[str, Any]) -> None:
    assert make(**{"d_model": 6, "num_heads": 3, **fields})[0].whole is None


def test_what_overflows_overflows_either_way() -> None:
    layer, plain = make(d_model=6, num_heads=3)
    call = call_of(layer, 1, 4)
    huge = replace(call, query=call.query * 1e30, key=call.key * 1e30)
    for name in OUTPUTS:
        assert torch.equal(layer(huge).tensors[name].isfinite(), plain(huge).tensors[name].isfinite())


def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many items torch's operation is asked for at a time, from here on."""
    sizes: list[int] = []
    operation = torch._native_multi_head_attention

    def counted(query: torch.Tensor, *more: Any) -> Any:
        sizes.append(query.shape[0])
        return operation(query, *more)

    monkeypatch.setattr(torch, "_native_multi_head_attention", counted)
    return sizes


def test_torch_is_asked_where_there_is_more_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short call by itself is done in NumPy; several, or a longer one, in torch."""
    layer, _ = make(d_model=64, num_heads=8)
    sizes = asked(monkeypatch)
    layer(call_of(layer, 1, 21))
    assert sizes == []
    layer(call_of(layer, 1, 22))
    layer(call_of(layer, 2, 21))
    assert sizes == [1, 2]
    many, _ = make(d_model=33, num_heads=33)
    layer = many
    del sizes[:]
    layer(call_of(layer, 1, 15))
    assert sizes == []
    layer(call_of(layer, 1, 16))
    assert sizes == [1]


@pytest.mark.parametrize(("width", "wide"), [(128, False), (130, True)])
def test_a_wide_layer_has_neither_since_their_sums_depend_on_how_many_rows_there_are(
    width: int, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, _ = make(d_model=width, num_heads=2)
    sizes = asked(monkeypatch)
    layer(call_of(layer, 1, 1))
    layer(call_of(layer, 2, 1))
    assert sizes == ([] if wide else [2])
    assert layer.whole is not None
    assert (layer.whole._single is None) is wide


@pytest.mark.parametrize("shared", [(), ("key",), ("key", "value")], ids=["three", "key", "both"])
@pytest.mark.parametrize("size", [1.0, 8.0, 15.0, 200.0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_short_calls_of_any_size_agree_with_a_float64_reference(size: float, dtype: str, shared: tuple[str, ...]) -> None:
    """With scores below and far above those whose exponentials can be added up as they are."""
    layer, _ = make(d_model=15, num_heads=3, dtype=dtype, seed=5)
    call = call_of(layer, 1, 7, seed=3)
    call = replace(call, query=call.query * size)
    if shared:
        call = replace(call, key=call.query, value=call.query if "value" in shared else call.value)
    before = [x.clone() for x in (call.query, call.key, call.value)]
    got = layer(call).tensors
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
    assert all(torch.equal(x, y) for x, y in zip(before, (call.query, call.key, call.value), strict=True))


def missing(*_: Any) -> Any:
    raise AttributeError("_native_multi_head_attention")


def refusing(*_: Any) -> Any:
    raise RuntimeError("not with these arguments")


def wrong(query: torch.Tensor, *_: Any) -> Any:
    return query * 1.001, torch.ones(query.shape[0], 3, query.shape[1], query.shape[1])


@pytest.mark.parametrize("operation", [missing, refusing, wrong])
def test_a_torch_that_lacks_it_or_does_otherwise_computes_the_long_way(operation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_native_multi_head_attention", operation)
    layer, plain = make(d_model=6, num_heads=3)
    assert layer.whole is None
    assert distance(layer, plain, call_of(layer, 2, 7)) == 0
