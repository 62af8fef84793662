"""Short calls in C: every implementation that this processor can run agrees with the float64 reference.

Where the extension is not built, torch's computation is the only implementation, and the same tests hold for it.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attend.attention.call import Call
from attend.attention.kernels import short
from attend.attention.kernels.short import MAX_PRODUCT, MAX_WIDTH, ShortKernel
from attend.attention.layer import MultiHeadAttention
from attend.attention.native.extension import passes_self_test
from attend.attention.reference import forward
from attend.attention.reference.forward import Outputs
from attend.serving.calls import make_call
from attend.wire.problems import validate
from attend.wire.schemas.attend import AttendRequest
from support.layers import call_of, make, rows_masks

TOLERANCE = 2e-6  # of the largest value: float32 rounds scores by about a tenth of it


OUTPUTS = ShortKernel.outputs


def implementations(layer: MultiHeadAttention) -> Iterator[MultiHeadAttention]:
    """The layer as torch computes it, and with each implementation in C."""
    layer.short = None
    yield layer
    for variant in short.extension.variants if short.extension is not None else ():
        layer.short = ShortKernel(layer.spec, layer.weights, variant)
        yield layer


def reference(layer: MultiHeadAttention, call: Call) -> Outputs:
    weights = {name: tensor.double().numpy() for name, tensor in layer.weights.items()}
    query, key, value = (x.double().numpy() for x in (call.query, call.key, call.value))
    return forward.attend(layer.spec, weights, query=query, key=key, value=value)


def distance(got: torch.Tensor, wanted: Any) -> float:
    """The largest difference, relative to the largest value."""
    assert got.shape == wanted.shape
    return float(np.abs(got.double().numpy() - wanted).max() / np.abs(wanted).max())


def cross_attention(layer: MultiHeadAttention, items: int, queries: int, keys: int) -> Call:
    """Three different inputs."""
    key, value = (call_of(layer, items, keys, seed=seed).query for seed in (1, 2))
    return call_of(layer, items, queries, key=key, value=value, masks=rows_masks(keys))


def is_short(layer: MultiHeadAttention, call: Call) -> bool:
    return layer.short is not None and layer.short.computes(call) and layer.short.is_short(call)


@given(
    heads=st.sampled_from([1, 2, 3, 5, 8]),
    head_dim=st.sampled_from([1, 2, 3, 7, 8, 16, 17, 33]),
    items=st.integers(1, 3),
    queries=st.integers(1, 37),
    keys=st.integers(1, 41),
    bias=st.sampled_from([True, False, {"query": True, "key": False, "value": True, "output": False}]),
)
def test_every_implementation_agrees_with_the_reference(heads: int, head_dim: int, items: int, queries: int, keys: int, bias: Any) -> None:
    layer, _ = make(d_model=heads * head_dim, num_heads=heads, bias=bias, seed=items, init="torch_linear")
    call = cross_attention(layer, items, queries, keys)
    wanted = reference(layer, call)
    for each in implementations(layer):
        result = each.short.compute(call) if each.short else each.forward(call)
        assert result is not None
        tensors = result.tensors
        assert tensors.keys() == OUTPUTS
        for name in OUTPUTS:
            assert distance(tensors[name], getattr(wanted, name)) <= TOLERANCE


@st.composite
def masked(draw: st.DrawFn, b: int, h: int, q: int, k: int) -> dict[str, Any]:
    """Fields of a request that restrict its keys or weigh its heads: a few of those that may stand together."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pairs = tuple(draw(st.sampled_from([1, n])) for n in (b, h, q, k))
    bias = rng.standard_normal(pairs)
    bias[rng.random(pairs) < draw(st.sampled_from([0, 0.4]))] = -np.inf
    fields: dict[str, Any] = {
        "causal": True,
        "window": {"left": draw(st.sampled_from([None, 0, 2])), "right": draw(st.sampled_from([0, 3]))},
        "valid_lens": rng.integers(0, k + 1, (b, q)[: draw(st.integers(1, 2))]),
        draw(st.sampled_from(["attend_mask", "block_mask"])): rng.random(pairs) < 0.5,
        draw(st.sampled_from(["attend_keys", "block_keys"])): rng.random((b, k)) < 0.5,
        "query_segments": rng.integers(-1, 2, (b, q)),
        "bias": bias,
        "head_scale": rng.standard_normal((b, h)[draw(st.integers(0, 1)) :]),
    }
    names = draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=4, unique=True))
    chosen = {name: fields[name] for name in names}
    if "query_segments" in chosen:
        chosen["key_segments"] = rng.integers(-1, 2, (b, k))
    offset = draw(st.sampled_from([0, 2, -1, "end", rng.integers(-2, k, b).tolist()]))
    return chosen | {"query_offset": offset, "fully_masked": draw(st.sampled_from(["zero", "zero", "uniform"]))}


@given(
    data=st.data(),
    heads=st.sampled_from([1, 2, 5]),
    head_dim=st.sampled_from([3, 8]),
    items=st.sampled_from([1, 2]),
    queries=st.sampled_from([1, 3, 17]),
    keys=st.sampled_from([2, 7, 19]),
    own=st.sampled_from([{}, {"window": {"left": 3, "right": 1}}, {"chunk_size": 4}]),
)
def test_masks_biases_and_factors_of_heads_agree_with_the_reference(
    data: st.DataObject, heads: int, head_dim: int, items: int, queries: int, keys: int, own: dict[str, Any]
) -> None:
    layer, _ = make(d_model=heads * head_dim, num_heads=heads, seed=items, init="torch_linear", **own)
    plain = cross_attention(layer, items, queries, keys)
    fields = data.draw(masked(items, heads, queries, keys))
    inputs = {name: getattr(plain, name).double().numpy() for name in ("query", "key", "value")}
    call = make_call(validate(AttendRequest, {**inputs, **fields}), layer.spec)
    wanted = forward.attend(layer.spec, {name: x.double().numpy() for name, x in layer.weights.items()}, **inputs, **fields)
    for each in implementations(layer):
        assert each.short is None or is_short(each, call)
        got = each.forward(call)
        for name in OUTPUTS:
            np.testing.assert_allclose(got.tensors[name], getattr(wanted, name), rtol=0, atol=2e-5)
        assert (np.zeros_like(wanted.fully_masked) if got.fully_masked is None else got.fully_masked.numpy()).tolist() == (
            wanted.fully_masked.tolist()
        )
        if each.short is not None:
            uniform = call.options.fully_masked == "uniform" and bool(wanted.fully_masked.any())
            assert (each.short.compute(call) is None) == uniform


@pytest.mark.parametrize(("heads", "head_dim", "queries", "keys"), [(8, 8, 16, 16), (3, 7, 11, 13), (5, 3, 2, 31)])
def test_replies_of_a_server_agree_with_the_reference(http: httpx.Client, heads: int, head_dim: int, queries: int, keys: int) -> None:
    fields = {"d_model": heads * head_dim, "num_heads": heads, "init": "torch_linear", "seed": 3}
    layer, _ = make(**fields)
    call = cross_attention(layer, 2, queries, keys)
    assert http.put("/layers/short", json={"spec": fields}).is_success
    inputs = {name: getattr(call, name).tolist() for name in ("query", "key", "value")}
    answer = http.post("/attend", json={"layer": "short", **inputs})
    assert http.delete("/layers/short").is_success
    wanted = reference(layer, call)
    for name in OUTPUTS:
        assert distance(torch.tensor(answer.json()[name]), getattr(wanted, name)) <= TOLERANCE


@pytest.mark.parametrize("size", [1.0, 8.0, 15.0, 200.0])
def test_scores_of_any_size_agree_with_the_reference(size: float) -> None:
    layer, _ = make(d_model=15, num_heads=3, seed=5)
    call = call_of(layer, 2, 7, seed=3)
    call = replace(call, query=call.query * size, key=call.query * size, value=call.query * size)
    wanted = reference(layer, call)
    rounding = max(1.0, float(np.abs(wanted.scores).max())) * torch.finfo(torch.float32).eps  # of a score, and so of weights
    for each in implementations(layer):
        got = each.forward(call).tensors
        for name in OUTPUTS:
            assert distance(got[name], getattr(wanted, name)) <= 8 * rounding


@pytest.mark.parametrize("scale", [1e20, 1e30, 3e38])
def test_overflow_gives_the_numbers_of_torch(scale: float) -> None:
    """Infinity and NaN where sums overflow, and all other numbers."""
    layer, plain = make(d_model=6, num_heads=3)
    call = call_of(layer, 2, 4)
    scaled = call.query.clone()
    scaled[0, 1] *= scale / float(scaled[0, 1].abs().max())
    call = replace(call, query=scaled, key=scaled, value=scaled)
    wanted = plain.forward(call).tensors
    for each in implementations(layer):
        got = each.forward(call).tensors
        for name in OUTPUTS:
            torch.testing.assert_close(got[name], wanted[name], equal_nan=True)


def test_an_item_has_the_same_bits_alone_and_in_a_batch() -> None:
    layer, _ = make(d_model=35, num_heads=5)
    call = cross_attention(layer, 7, 11, 13)
    for each in implementations(layer):
        if each.short:
            together = each.forward(call).tensors
            for i in range(7):
                item = replace(call, **{name: getattr(call, name)[i : i + 1] for name in ("query", "key", "value")})
                alone = each.forward(item.with_options(items=1)).tensors
                assert all(torch.equal(alone[name][0], together[name][i]) for name in OUTPUTS)


@pytest.mark.parametrize("outputs", [{"output"}, {"attention_weights"}], ids=str)
def test_only_requested_outputs_are_returned(outputs: set[str]) -> None:
    layer, plain = make(d_model=6, num_heads=3)
    call = call_of(layer, 2, 7, outputs=frozenset(outputs))
    wanted = plain.forward(call).tensors
    for each in implementations(layer):
        got = each.forward(call).tensors
        assert got.keys() == outputs
        assert all(distance(got[name], wanted[name].numpy()) <= TOLERANCE for name in outputs)


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
    layer, _ = make(d_model=6, num_heads=3)
    call = call_of(layer, 2, 7)
    heads, queries = list(select.get("heads", range(3))), list(select.get("queries", range(7)))
    for each in implementations(layer):
        wanted = each.forward(call).tensors["attention_weights"][:, heads][:, :, queries]
        got = each.forward(call.with_options(**select)).tensors
        if "top_k" in select:
            assert torch.equal(got["values"], wanted.gather(-1, got["keys"]))
            assert torch.equal(got["keys"], wanted.argsort(dim=-1, descending=True, stable=True)[..., :2])
        else:
            torch.testing.assert_close(got["attention_weights"], wanted.mean(1) if "average" in select else wanted)


@pytest.mark.parametrize(
    "more",
    [
        {"softcap": 0.5},
        {"dropout": (0.5, 3)},
        {"pattern": torch.full((1, 1, 7, 7), 0.25)},
        {"reproducible": True},
        {"outputs": frozenset({"output", "scores"})},
    ],
    ids=lambda more: next(iter(more)),
)
def test_torch_computes_calls_with_other_outputs_or_options(more: dict[str, Any]) -> None:
    layer, plain = make(d_model=6, num_heads=3)
    call = call_of(layer, 2, 7, **more)
    assert not is_short(layer, call)
    got, wanted = layer.forward(call).tensors, plain.forward(call).tensors
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(("items", "rows"), [(1, MAX_PRODUCT // 64**2 + 1), (MAX_PRODUCT // 64**2 + 1, 1), (1, 0), (0, 4)])
def test_torch_computes_long_and_empty_calls(items: int, rows: int) -> None:
    layer, plain = make(d_model=64, num_heads=8)
    call = call_of(layer, items, rows)
    assert not is_short(layer, call)
    assert torch.equal(layer.forward(call).tensors["output"], plain.forward(call).tensors["output"])


@pytest.mark.parametrize(
    "fields",
    [
        {"num_kv_heads": 1},
        {"head_dim": 4},
        {"value_head_dim": 5},
        {"key_dim": 5},
        {"output_dim": 5},
        {"projections": False},
        {"rope": {"theta": 100.0}},
        {"alibi": True},
        {"sinks": True},
        {"qk_norm": {"kind": "rms"}},
        {"output_gate": {}},
        {"latent": {"key_value_rank": 8, "rope_key_dim": 1}},
        {"relative_scores": {"kind": "transformer_xl"}},
        {"grid_bias": {"height": 3, "width": 5}},
        {"differential": {}},
        {"normalizer": "sigmoid"},
        {"indexer": {"num_heads": 3, "head_dim": 2, "top_k": 5}},
        {"dtype": "float16"},
        {"dtype": "float64"},
        {"d_model": MAX_WIDTH + 2},
    ],
    ids=str,
)
def test_torch_computes_calls_to_other_layers(fields: dict[str, Any]) -> None:
    assert make(**{"d_model": 6, "num_heads": 3, **fields})[0].short is None


def test_without_the_extension_torch_computes_short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short, "extension", None)
    layer, plain = make(d_model=64, num_heads=8)
    call = call_of(layer, 1, 16)
    assert layer.short is None
    assert torch.equal(layer.forward(call).tensors["output"], plain.forward(call).tensors["output"])


def test_an_extension_that_computes_wrongly_is_not_used() -> None:
    """Its results are compared with torch's when it is loaded."""
    extension = short.extension
    if extension is not None:
        functions = {name: getattr(extension, name) for name in ("variants", "layer", "attend", "attend_cache")}
        assert passes_self_test(SimpleNamespace(**functions))
        plain = lambda *args: extension.attend(*args[:10])  # noqa: E731  # without masks
        for attend in (lambda *_: False, lambda *_: True, plain, lambda *args: extension.attend(*args[:4], 1.0, *args[5:])):
            assert not passes_self_test(SimpleNamespace(**{**functions, "attend": attend}))
        for attend in (lambda *_: None, lambda *args: extension.attend_cache(*args[:5], 1.0, *args[6:])):
            assert not passes_self_test(SimpleNamespace(**{**functions, "attend_cache": attend}))


@pytest.mark.parametrize("size", [2**31 - 1, 2**20, 2**14, 0, -1])
def test_sizes_of_any_magnitude_are_refused(size: int) -> None:
    row = np.zeros(6, np.float32)
    for variant in short.extension.variants if short.extension is not None else ():
        with pytest.raises(ValueError, match="sizes"):
            short.extension.layer(size, 1, variant, (row,) * 4, (row,) * 4)
        layer = short.extension.layer(1, 1, variant, (row[:1],) * 4, (row[:1],) * 4)
        for sizes in ((size, size, size), (1, size, 1), (1, 1, size)):
            with pytest.raises(ValueError, match="sizes"):
                short.extension.attend(layer, *sizes, 1.0, *[row.ctypes.data] * 3, row.copy(), row.copy())


def test_masks_that_do_not_fit_are_refused() -> None:
    square, row = np.zeros((6, 6), np.float32), np.zeros(6, np.float32)
    fitting: list[Any] = [np.zeros((1, 3, 2), np.bool_), 1, 1, 0, *(np.zeros((1, n), np.int64) for n in (2, 1))]
    fitting += [np.zeros((1, 3, 1, 5), np.bool_), np.zeros((1, 5), np.bool_), *(np.zeros((1, n), np.int64) for n in (2, 5))]
    fitting += [np.zeros((1, 1, 2, 5), np.float32), np.zeros((1, 3, 1, 1), np.float32)]
    for variant in short.extension.variants if short.extension is not None else ():
        layer = short.extension.layer(6, 3, variant, (square,) * 4, (row,) * 4)
        sizes = (layer, 1, 2, 5, 1.0, *[np.zeros(30, np.float32).ctypes.data] * 3)
        outputs = np.zeros(12, np.float32), np.zeros(30, np.float32)
        assert short.extension.attend(*sizes, *outputs, tuple(fitting))
        for i, array in enumerate(fitting):
            if isinstance(array, np.ndarray):
                for wrong in (np.zeros((*array.shape[:-1], 4), array.dtype), array.astype(np.float16), *([array[0]] if i else [])):
                    with pytest.raises(ValueError, match="sizes"):
                        short.extension.attend(*sizes, *outputs, (*fitting[:i], wrong, *fitting[i + 1 :]))
        with pytest.raises(ValueError, match="segments"):
            short.extension.attend(*sizes, *outputs, (*fitting[:8], None, *fitting[9:]))


@pytest.mark.parametrize("wrong", ["output", "weights"])
def test_sizes_that_do_not_fit_are_refused(wrong: str) -> None:
    """Nothing is written beyond an array."""
    square, row, rows = np.zeros((6, 6), np.float32), np.zeros(6, np.float32), np.zeros(18, np.float32)
    arrays = [np.zeros(size - (name == wrong), np.float32) for name, size in {"output": 12, "weights": 18}.items()]
    for variant in short.extension.variants if short.extension is not None else ():
        layer = short.extension.layer(6, 3, variant, (square,) * 4, (row,) * 4)
        with pytest.raises(ValueError, match="sizes"):
            short.extension.attend(layer, 1, 2, 3, 1.0, *[rows.ctypes.data] * 3, *arrays)
        with pytest.raises(ValueError, match="sizes"):
            short.extension.layer(7, 1, variant, (square,) * 4, (row,) * 4)
        with pytest.raises(ValueError, match="variant"):
            short.extension.layer(6, 3, "none", (square,) * 4, (row,) * 4)
