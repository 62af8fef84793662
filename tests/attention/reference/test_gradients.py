"""The hand-derived gradients (`support/gradients.py`) against torch's autograd, finite differences and invariants."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from attend.attention.initialization import draw_weights
from attend.attention.reference.forward import attend
from attend.check.random_cases import FEATURES, random_case
from attend.spec import LayerSpec
from attend.spec_parts import PROJECTIONS
from support.cases import weights_of
from support.gradients import gradients
from support.oracles import oracle_steps
from support.transformers_positions import deberta_bucket, xlnet_sinusoids

NAMES = ("query", "key", "value")
TINY = LayerSpec(d_model=1, num_heads=1, scale=1.0, dtype="float64")
LATENT = {"query_rank": 3, "key_value_rank": 5, "rope_key_dim": 1}
ONES = {f"{name}.weight": np.ones((1, 1)) for name in PROJECTIONS}


def draw_case(seed, **options):
    """A case, its weights, and a gradient of its output."""
    rng = np.random.default_rng(seed)
    case = random_case(rng, dtype="float64", **{"rate": 0.45, **options})
    weights = weights_of(case)
    return (
        case.spec,
        weights,
        with_separate_inputs(case.request),
        rng.standard_normal(attend(case.spec, weights, **case.request).output.shape),
    )


def with_separate_inputs(request):
    key = request.get("key", request["query"])
    return request | {"key": key, "value": request.get("value", key)}


def assert_close(got, expected, tolerance):
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * max(1.0, np.abs(expected).max(initial=0.0)))


# --- autograd -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(150))
def test_agrees_with_autograd(seed):
    spec, weights, request, back = draw_case(seed, features=FEATURES, batched=True)
    inputs = {name: torch.tensor(request[name], requires_grad=True) for name in NAMES}
    forward = attend(spec, weights, **request)
    output = torch_output(spec, {name: torch.tensor(x) for name, x in weights.items()}, request, inputs, forward)
    assert_close(forward.output, output.detach().numpy(), 1e-10)
    expected = torch.autograd.grad(output, list(inputs.values()), torch.tensor(back))
    got = gradients(spec, weights, back, **request)
    assert list(got) == [f"{name}_gradient" for name in NAMES]
    for name, x in zip(NAMES, expected, strict=True):
        assert_close(got[f"{name}_gradient"], x.numpy(), 1e-9)


def torch_output(spec, weights, request, inputs, forward):
    """The output computed with torch: its norms, RoPE by `rotate_half` or by complex numbers, the sink as one column more.

    The blocked keys are those of the reference, which other tests check.
    """
    q, k, v = (torch_heads(spec, weights, name, x) for name, x in inputs.items())
    (queries, keys), offset = forward.scores.shape[2:], offset_of(request, forward)
    if spec.rope:
        of_queries = torch.as_tensor(request.get("positions", torch.arange(queries) + offset[:, None]))
        of_keys = torch.as_tensor(request.get("key_positions", request.get("positions", torch.arange(keys).expand(len(k), keys))))
        places = ((q, of_queries), (k, of_keys))
        q, k = (torch.cat([torch_rope(part, at, spec.rope) for part in torch_parts(spec, x)], -1) for x, at in places)
    if spec.qk_norm and spec.qk_norm.after_rope:
        q, k = (torch_norm(x, weights, name, spec.qk_norm) for x, name in ((q, "query"), (k, "key")))
    if spec.query_scale:
        steps = torch.floor(((torch.arange(queries) + offset[:, None]).clamp(min=0) + spec.query_scale.shift) / spec.query_scale.length)
        q = q * (1 + spec.query_scale.factor * torch.log1p(steps.double()))[:, None, :, None]
    group = spec.num_heads // spec.num_kv_heads
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    blocked = torch.tensor(np.isneginf(forward.scores))
    ahead = torch.arange(keys) - (torch.arange(queries) + offset[:, None])[..., None]  # [b, q, k]
    bias = torch_bias(spec, weights, request, ahead)
    if spec.grid_bias:
        bias = bias + torch_grid(spec.grid_bias, weights, q, torch.arange(queries) + offset[:, None], keys)
    for own_bias in oracle_steps(spec, "torch_bias_of_visible"):
        bias = bias + own_bias(weights, inputs, torch.arange(queries) + offset[:, None], blocked)
    pairs = zip(torch_parts(spec, q), torch_parts(spec, k), strict=True)
    terms = torch_relative(spec, weights, q, k, ahead)
    parts = [torch_weights(spec, weights, request, *pair, terms, bias, blocked) for pair in pairs]
    attention_weights = parts[0]
    if spec.differential:
        first, second = (torch.exp(weights[f"lambda_q{i}"] @ weights[f"lambda_k{i}"]) for i in (1, 2))
        attention_weights = parts[0] - (first - second + spec.differential.lambda_init) * parts[1]
    if dropout := request.get("dropout"):
        stream = np.random.RandomState(dropout["seed"]).random_sample(forward.scores.shape)
        attention_weights = attention_weights * torch.tensor(stream >= dropout["p"]) / (1 - dropout["p"])
    heads = torch.einsum("bhij,bhjd->bihd", attention_weights, v)
    if spec.differential:
        heads = functional.rms_norm(heads, heads.shape[-1:], weights.get("head_norm.weight"), spec.differential.eps)
        heads = heads * (1 - spec.differential.lambda_init)
    if "head_scale" in request:
        heads = heads * torch.tensor(np.asarray(request["head_scale"], np.float64)).expand(len(q), spec.num_heads)[:, None, :, None]
    if spec.output_gate:
        logits = functional.linear(inputs["query"], weights["gate.weight"], weights.get("gate.bias"))
        function = torch.sigmoid if spec.output_gate.activation == "sigmoid" else functional.softplus
        heads = heads * function(logits).unflatten(-1, (spec.num_heads, -1))
    concatenated = heads.flatten(2)
    return functional.linear(concatenated, weights["output.weight"], weights.get("output.bias")) if spec.projections else concatenated


def torch_parts(spec, x):
    return x.chunk(2, dim=-1) if spec.differential else [x]


def torch_weights(spec, weights, request, q, k, terms, bias, blocked):
    """One softmax, and what is done with its weights before fully masked rows are filled."""
    empty, uniform = blocked.all(-1, keepdim=True), 1 / k.shape[2] if request.get("fully_masked") == "uniform" else 0.0
    scores = (torch.einsum("bhid,bhjd->bhij", q, k) + terms) * request.get("scale", spec.scale)
    if cap := request.get("softcap", spec.softcap):
        scores = cap * torch.tanh(scores / cap)
    for mix in oracle_steps(spec, "torch_score"):
        scores = mix(weights, scores)
    scores = scores + bias
    if spec.normalizer == "scalable_softmax":
        scores = scores * (~blocked).sum(-1, keepdim=True).clamp(min=1).double().log()
    if spec.normalizer == "sigmoid":
        counts = torch.tensor(in_sequence(request, scores.shape).sum(-1)).clamp(min=1)
        normalised = torch.sigmoid(scores - counts.double().log()[:, None, :, None]).masked_fill(blocked, 0.0)
    else:
        sink = weights["sinks"] if spec.sinks else torch.full((spec.num_heads,), -1e30, dtype=torch.float64)
        columns = torch.cat([scores.masked_fill(blocked, -torch.inf), sink[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
        normalised = torch.softmax(columns, dim=-1)[..., :-1].masked_fill(empty, 0.0)
    for mix in oracle_steps(spec, "torch_mix_weights"):
        normalised = mix(weights, normalised).masked_fill(blocked, 0.0)
    return normalised.masked_fill(empty, uniform)


def torch_heads(spec, weights, name, x):
    heads = spec.num_heads if name == "query" else spec.num_kv_heads
    given = x
    if spec.latent and (name != "query" or spec.latent.query_rank):
        down = "query_down" if name == "query" else "key_value_down"
        x = functional.linear(x, weights[f"{down}.weight"], weights.get(f"{down}.bias"))
        x = functional.rms_norm(x, x.shape[-1:], weights[f"{down}_norm.weight"], spec.latent.eps)
    if spec.projections:
        x = functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))
    x = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    if spec.latent and name == "key":
        shared = functional.linear(given, weights["rope_key.weight"], weights.get("rope_key.bias"))
        x = torch.cat([shared[:, None].repeat(1, heads, 1, 1), x], dim=-1)
    if not spec.qk_norm or not (spec.qk_norm.values if name == "value" else not spec.qk_norm.after_rope):
        return x
    return torch_norm(x, weights, name, spec.qk_norm)


def torch_norm(x, weights, name, norm):
    """torch's norm over the last axis: of one head, or of all heads concatenated."""
    x = x.transpose(1, 2)
    rows = x if norm.over == "head" else x.flatten(2)
    function = functional.rms_norm if norm.kind == "rms" else functional.layer_norm
    x = function(rows, rows.shape[-1:], eps=norm.eps).reshape(x.shape)
    x = x * weights.get(f"{name}_norm.weight", 1.0) + weights.get(f"{name}_norm.bias", 0.0)  # [d], or [heads, d]
    return x.transpose(1, 2)


def offset_of(request, forward):
    """query_offset of each item; "end" as a number."""
    b, _, q, _ = forward.scores.shape
    offset = request.get("query_offset", 0)
    if isinstance(offset, str):
        offset = [1 + np.flatnonzero(item).max(initial=-1) - q for item in real_keys(request, forward.scores.shape)]
    return torch.tensor(np.broadcast_to(np.asarray(offset), (b,)).copy())


def real_keys(request, shape):
    """bool [b, k]: the keys that lengths, key masks and segments do not block for every query."""
    b, _, q, k = shape
    real = np.ones((b, q, k), bool)
    if "valid_lens" in request:
        real &= np.arange(k) < np.broadcast_to(request["valid_lens"].reshape(b, -1, 1), (b, q, 1))
    if "attend_keys" in request:
        real &= np.asarray(request["attend_keys"], bool)[:, None]
    if "block_keys" in request:
        real &= ~np.asarray(request["block_keys"], bool)[:, None]
    if "key_segments" in request:
        real &= (request["key_segments"] >= 0)[:, None]
    return real.any(axis=1)


def in_sequence(request, shape):
    """bool [b, q, k]: the real keys of each query's segment."""
    real = np.repeat(real_keys(request, shape)[:, None], shape[2], axis=1)
    if "query_segments" in request:
        real &= request["query_segments"][:, :, None] == request["key_segments"][:, None]
    return real


def torch_rope(x, positions, rope):
    frequencies = torch.tensor(rope.theta, dtype=torch.float64) ** (-torch.arange(0, rope.dims, 2, dtype=torch.float64) / rope.dims)
    if rope.scaling and rope.scaling.type == "linear":
        frequencies = frequencies / rope.scaling.factor
    if rope.scaling and rope.scaling.type == "llama3":
        turns = rope.scaling.original_max_position * frequencies / (2 * torch.pi)
        smooth = (turns - rope.scaling.low_freq_factor) / (rope.scaling.high_freq_factor - rope.scaling.low_freq_factor)
        frequencies = torch.lerp(frequencies / rope.scaling.factor, frequencies, smooth.clamp(0, 1))
    if rope.frequencies:
        frequencies = torch.tensor(rope.frequencies, dtype=torch.float64)
    of_pairs = positions[..., None] if positions.ndim == 2 else positions[..., torch.tensor(rope.axes)]
    angles = of_pairs[:, None] * frequencies
    lengths = torch.full_like(angles, rope.attention_factor)
    turning, rest = x[..., : rope.dims], x[..., rope.dims :]
    if rope.interleaved:
        points = torch.view_as_complex(turning.unflatten(-1, (-1, 2)).contiguous())
        return torch.cat([torch.view_as_real(points * torch.polar(lengths, angles)).flatten(-2), rest], dim=-1)
    angles = torch.cat([angles, angles], dim=-1)
    first, second = turning.chunk(2, dim=-1)
    turned = turning * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
    return torch.cat([turned * rope.attention_factor, rest], dim=-1)


def torch_bias(spec, weights, request, ahead):
    bias = torch.tensor(request.get("bias", np.zeros((1, 1))))
    bias = bias[:, None] if bias.ndim == 3 else bias
    if spec.alibi:
        power = 2 ** math.floor(math.log2(spec.num_heads))
        own, other = (
            torch.tensor(2.0, dtype=torch.float64) ** (-8 * torch.arange(1, n + 1, dtype=torch.float64) / n) for n in (power, 2 * power)
        )
        slopes = torch.cat([own, other[::2]])[: spec.num_heads]
        bias = bias - torch.einsum("h,bij->bhij", slopes, ahead.abs().double())
    if spec.relative_bias:
        table, settings = weights["relative_bias"], spec.relative_bias
        buckets = t5_bucket(ahead, settings.bidirectional, settings.buckets, settings.max_distance)
        bias = bias + functional.embedding(buckets, table).permute(0, 3, 1, 2)
    return bias


def torch_relative(spec, weights, q, k, ahead):
    """From a table with an embedding of every distance."""
    relative, near = spec.relative_scores, int(-ahead.max()) if ahead.numel() else 0
    if relative is None or not ahead.numel():
        return 0.0
    distances = torch.arange(near, int(-ahead.min()) + 1)
    if relative.kind == "transformer_xl":
        bound = relative.max_distance or 10**9
        table = xlnet_sinusoids(distances.clamp(-bound, bound).double(), spec.d_model)
        table = table.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) if relative.interleaved else table
    else:
        rows = deberta_bucket(distances, relative.buckets, relative.max_distance) if relative.buckets else distances
        size = relative.buckets or relative.max_distance
        table = functional.one_hot((rows + size).clamp(0, 2 * size - 1), 2 * size).double()
    embedded = functional.embedding(-ahead - near, table)  # [b, q, k, width]
    keys = functional.linear(embedded, weights["position_key.weight"]).unflatten(-1, (spec.num_heads, -1))
    if relative.kind == "transformer_xl":
        u, v = weights["content_bias"][:, None], weights["position_bias"][:, None]
        return torch.einsum("hid,bhjd->bhij", u, k) + torch.einsum("bhid,bijhd->bhij", q + v, keys)
    terms = torch.einsum("bhid,bijhd->bhij", q, keys)
    if relative.position_to_content:
        queries = functional.linear(embedded, weights["position_query.weight"]).unflatten(-1, (spec.num_heads, -1))
        terms = terms + torch.einsum("bhjd,bijhd->bhij", k, queries)
    return terms


def torch_grid(grid, weights, q, indices, keys):
    """The index of Swin's and BEiT's code in transformers, 5.23; and for SAM's, differences of its rows and columns."""
    coords = torch.stack(torch.meshgrid(torch.arange(grid.height), torch.arange(grid.width), indexing="ij")).flatten(1)
    relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0)
    relative = relative + torch.tensor([grid.height - 1, grid.width - 1])
    if grid.kind == "decomposed":
        vectors = weights["grid_rows"][relative[..., 0]] + weights["grid_columns"][relative[..., 1]]
        return torch.einsum("bhid,bijd->bhij", q, vectors[indices][:, :, :keys])
    tokens, last = grid.num_tokens, len(weights["grid_bias"])
    index = torch.zeros(tokens, tokens, dtype=torch.int64)
    inner = index[1:, 1:] if grid.class_token else index
    inner.copy_((relative * torch.tensor([2 * grid.width - 1, 1])).sum(-1))
    if grid.class_token:
        index[0, 0:] = last - 3
        index[0:, 0] = last - 2
        index[0, 0] = last - 1
    return weights["grid_bias"][index[indices][:, :, :keys]].permute(0, 3, 1, 2)


def t5_bucket(relative_position, bidirectional, num_buckets, max_distance):
    """transformers' T5Attention._relative_position_bucket, 5.23."""
    relative_buckets = 0
    if bidirectional:
        num_buckets //= 2
        relative_buckets += (relative_position > 0).to(torch.long) * num_buckets
        relative_position = torch.abs(relative_position)
    else:
        relative_position = -torch.min(relative_position, torch.zeros_like(relative_position))
    max_exact = num_buckets // 2
    is_small = relative_position < max_exact
    scale = math.log(max_distance / max_exact)
    relative_position_if_large = max_exact + (torch.log(relative_position.float() / max_exact) / scale * (num_buckets - max_exact)).to(
        torch.long
    )
    relative_position_if_large = torch.min(relative_position_if_large, torch.full_like(relative_position_if_large, num_buckets - 1))
    return relative_buckets + torch.where(is_small, relative_position, relative_position_if_large)


# --- finite differences ---------------------------------------------------------------------------------------------------------------


def slope_along(direction, name, spec, weights, request, back):
    """The slope of ⟨output_gradient, output⟩ along a direction of one input, to the fourth order in the step."""

    def at(step):
        return np.sum(back * attend(spec, weights, **request | {name: request[name] + step * direction}).output)

    step = 1e-5
    return (8 * (at(step) - at(-step)) - (at(2 * step) - at(-2 * step))) / (12 * step)


@pytest.mark.parametrize("seed", range(60))
def test_agrees_with_finite_differences(seed):
    spec, weights, request, back = draw_case(5000 + seed, features=FEATURES, init="xavier_uniform")
    rng = np.random.default_rng(seed)
    got = gradients(spec, weights, back, **request)
    for name in NAMES:
        direction = rng.standard_normal(request[name].shape)
        expected = slope_along(direction, name, spec, weights, request, back)
        assert np.sum(got[f"{name}_gradient"] * direction) == pytest.approx(expected, rel=1e-6, abs=1e-6)


# --- by hand --------------------------------------------------------------------------------------------------------------------------


def test_two_keys_have_the_gradient_of_the_logistic_function():
    """Query x, keys 0 and 1, values 0 and 1: the output is the logistic function σ(x), whose slope is σ(x) (1 - σ(x))."""
    x = 0.7
    got = gradients(TINY, ONES, [[1.0]], query=[[x]], key=[[0.0], [1.0]], value=[[0.0], [1.0]])
    sigma = 1 / (1 + np.exp(-x))
    slope = sigma * (1 - sigma)
    np.testing.assert_allclose(got["query_gradient"], [[slope]], rtol=1e-14)
    np.testing.assert_allclose(got["key_gradient"], [[-slope * x], [slope * x]], rtol=1e-14)
    np.testing.assert_allclose(got["value_gradient"], [[1 - sigma], [sigma]], rtol=1e-14)


def test_a_key_and_a_sink_have_the_gradient_of_the_logistic_function():
    """One key of value 1 and a sink of logit 0: the output is σ(x)."""
    spec = LayerSpec(d_model=1, num_heads=1, scale=1.0, dtype="float64", sinks=True)
    got = gradients(spec, {**ONES, "sinks": np.zeros(1)}, [[1.0]], query=[[0.7]], key=[[1.0]], value=[[1.0]])
    sigma = 1 / (1 + np.exp(-0.7))
    np.testing.assert_allclose(got["query_gradient"], [[sigma * (1 - sigma)]], rtol=1e-14)


# --- invariants -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_gradients_of_inputs_that_default_to_the_query_sum_to_its_gradient(seed):
    rng = np.random.default_rng(seed)
    features = set(FEATURES) - {"key", "value"}
    case = random_case(rng, dtype="float64", features=features, init="xavier_uniform")
    weights = weights_of(case)
    back = rng.standard_normal(attend(case.spec, weights, **case.request).output.shape)
    got = gradients(case.spec, weights, back, **case.request)
    separate = gradients(case.spec, weights, back, **with_separate_inputs(case.request))
    for name, x in separate.items():
        np.testing.assert_array_equal(got[name], x)
    direction = rng.standard_normal(case.request["query"].shape)
    expected = slope_along(direction, "query", case.spec, weights, case.request, back)
    assert sum(np.sum(x * direction) for x in got.values()) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("seed", range(30))
def test_gradients_without_a_batch_axis_equal_those_of_a_batch_of_one(seed):
    spec, weights, request, back = draw_case(seed, features=set(FEATURES) - {"dropout"}, batched=True)
    request = {name: x for name, x in request.items() if name not in ("attend_mask", "block_mask", "bias")}
    whole = gradients(spec, weights, back, **request)
    item = {
        name: x[1 % len(x)] if isinstance(x, np.ndarray) and not (name == "head_scale" and x.ndim == 1) else x
        for name, x in request.items()
    }
    for name, x in gradients(spec, weights, back[1], **item).items():
        assert_close(x, whole[name][1], 1e-12)


@pytest.mark.parametrize("seed", range(30))
def test_gradients_of_blocked_keys_and_fully_masked_rows_are_zero(seed):
    spec, weights, request, back = draw_case(seed, features={*FEATURES} - {"fully_masked"}, batched=True)
    got, forward = gradients(spec, weights, back, **request), attend(spec, weights, **request)
    unseen = np.isneginf(forward.scores).all(axis=(1, 2))  # [b, k]
    assert (got["key_gradient"][unseen] == 0).all()
    assert (got["value_gradient"][unseen] == 0).all()
    assert (got["query_gradient"][forward.fully_masked.all(axis=1)] == 0).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e300])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_values_of_blocked_keys_have_no_effect(poison, softcap):
    square = LayerSpec(d_model=10, num_heads=2, dtype="float64", softcap=softcap)
    weights = draw_weights(square)
    rng = np.random.default_rng(1)
    query, key, back = rng.standard_normal((1, 3, 10)), rng.standard_normal((1, 4, 10)), rng.standard_normal((1, 3, 10))
    clean = gradients(square, weights, back, query=query, key=key, block_keys=[[0, 0, 1, 0]])
    key[0, 2] = poison
    spoilt = gradients(square, weights, back, query=query, key=key, block_keys=[[0, 0, 1, 0]])
    for name, x in spoilt.items():
        assert_close(x, clean[name], 1e-13)


def test_uniform_rows_have_no_gradient_for_query_and_key():
    """Their weights depend on nothing, so the values alone have a gradient, of 1/k each."""
    got = gradients(TINY, ONES, [[1.0]], query=[[2.0]], key=[[1.0], [3.0]], block_keys=[1, 1], fully_masked="uniform")
    assert {name: x.ravel().tolist() for name, x in got.items()} == {
        "query_gradient": [0],
        "key_gradient": [0, 0],
        "value_gradient": [0.5, 0.5],
    }


@pytest.mark.parametrize("queries", [0, 2])
@pytest.mark.parametrize("keys", [0, 3])
@pytest.mark.parametrize("more", [{"sinks": True, "qk_norm": {}, "latent": LATENT}, {"differential": {}}], ids=["latent", "differential"])
def test_axes_of_length_zero_give_empty_gradients(queries, keys, more):
    spec = LayerSpec(d_model=8, num_heads=2, dtype="float64", rope={}, alibi=True, relative_bias={}, output_gate={}, **more)
    weights = {name: np.ones(shape) for name, shape in spec.weight_shapes().items()}
    got = gradients(
        spec, weights, np.ones((2, queries, 8)), query=np.ones((2, queries, 8)), key=np.ones((2, keys, 8)), causal=True, query_offset="end"
    )
    assert got["query_gradient"].shape == (2, queries, 8)
    assert got["key_gradient"].shape == got["value_gradient"].shape == (2, keys, 8)
