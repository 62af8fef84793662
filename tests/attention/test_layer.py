"""Random calls over HTTP against the reference in float64: every init, mask and output, by every implementation.

The weights are drawn here independently, as the documents say and with the libraries' own modules, so that tests and server share only the
arithmetic of the reference.
"""

import base64
import gc
import weakref
from dataclasses import replace
from typing import Any, get_args

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attend.attention.layer import MultiHeadAttention
from attend.attention.reference import forward
from attend.attention.reference.forward import Outputs
from attend.check.random_cases import LAYER_FEATURES, REQUEST_FEATURES, Case, random_case
from attend.cli.server_check import compare_reply, compared_outputs, largest_score, with_roundings
from attend.client import Client
from attend.spec import Init, LayerSpec
from support.cases import weights_of
from support.layers import json_body
from support.operator_cases import agree_with_finite_differences

INITS = get_args(Init)
OUTPUTS = (
    *("output", "attention_weights", "scores", "log_sum_exp", "query_projection", "key_projection", "value_projection"),
    *("head_outputs", "concatenated"),
)
NUMPY = {"FP32": np.float32, "FP64": np.float64, "INT64": np.int64}
SEEDS = st.integers(0, 2**32 - 1)
Weights = dict[str, np.ndarray[Any, Any]]
OFFSETS = [100, -100, 10_000, -10_000, 10_000_000, -10_000_000, 2**31 - 1, 1 - 2**31]
MASKS = ("key", "value", "mask", "key_mask", "valid_lens", "bias", "causal", "window", "fully_masked", "softcap", "dropout")
GRADIENTS = ["query_gradient", "key_gradient", "value_gradient"]


def documented_weights(spec: LayerSpec) -> Weights:
    """The weights of a spec, as the documents define them."""
    d, widths = spec.d_model, (spec.d_model, spec.key_dim, spec.value_dim, spec.d_model)
    names = ("query", "key", "value", "output")
    stream = np.random.RandomState(spec.seed)
    if spec.init == "xavier_uniform":
        made = {
            f"{name}.weight": ((stream.random_sample((d, width)) * 2 - 1) * np.sqrt(6 / (width + d))).astype(np.float32)
            for name, width in zip(names, widths, strict=True)
        }
        made |= {f"{name}.bias": np.zeros(d) for name in names}
    elif spec.init.startswith("numpy_"):
        made = {f"{name}.weight": (stream.randn(d, d) if spec.init == "numpy_normal" else stream.rand(d, d)).T for name in names}
    else:
        made = torch_weights(spec, names, widths)
    kept = [name for name in made if spec.bias or name.endswith("weight")]
    return {name: made[name].astype(spec.dtype) for name in kept}


def torch_weights(spec: LayerSpec, names: tuple[str, ...], widths: tuple[int, ...]) -> Weights:
    """The weights that torch's modules draw after `torch.manual_seed`."""
    with torch.random.fork_rng(devices=[]):  # also where a test has pretended another device
        torch.manual_seed(spec.seed)
        if spec.init == "torch_linear":
            linears = [torch.nn.Linear(width, spec.d_model, bias=spec.bias) for width in widths]
            state = {f"{name}.{key}": x for name, linear in zip(names, linears, strict=True) for key, x in linear.state_dict().items()}
        else:
            module = torch.nn.MultiheadAttention(spec.d_model, spec.num_heads, bias=spec.bias, kdim=spec.key_dim, vdim=spec.value_dim)
            packed = module.in_proj_weight
            parts = packed.chunk(3) if packed is not None else (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
            state = {f"{name}.weight": part for name, part in zip(names, (*parts, module.out_proj.weight), strict=True)}
            if spec.bias:
                biases = (*module.in_proj_bias.chunk(3), module.out_proj.bias)
                state |= {f"{name}.bias": part for name, part in zip(names, biases, strict=True)}
    return {name: tensor.detach().numpy() for name, tensor in state.items()}


def put_layer(http: httpx.Client, case: Case) -> Outputs:
    """Puts the case's layer on the server. Returns the reference's result of the case."""
    made = http.put("/layers/random", json={"spec": case.spec.model_dump(mode="json")})
    assert made.is_success, made.text
    return forward.attend(case.spec, documented_weights(case.spec), **case.request)


def attend(http: httpx.Client, case: Case, **fields: Any) -> dict[str, Any]:
    """The tensors of the server's reply as arrays, without rounding."""
    body = {**json_body(case.request), "layer": "random", "reply": {"form": "base64", "datatype": "FP64"}, **fields}
    answer = http.post("/attend", json=body)
    assert answer.status_code == 200, answer.text
    return {name: unpack(value) for name, value in answer.json().items() if name != "layer"}


def unpack(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "base64" not in value:
        return {name: unpack(part) for name, part in value.items()}
    return np.frombuffer(base64.b64decode(value["base64"]), NUMPY[value["datatype"]]).reshape(value["shape"])


def largest_sum(case: Case, exact_outputs: Outputs) -> float:
    """max of the sum over |query_i key_i|, times the scale: the largest possible score without cancellation."""
    sizes = replace(exact_outputs, query_projection=abs(exact_outputs.query_projection), key_projection=abs(exact_outputs.key_projection))
    return largest_score(case, sizes)


def assert_close(name: str, ours: Any, exact: Any, case: Case, exact_outputs: Outputs) -> None:
    """Asserts errors of at most 1e-10 in float64, and 1e-5 * max(1, max|scores|) in float32, each times max|output|.

    max|scores| is taken before caps and masks, since rounding happens there. The terms of a score may cancel out, so the errors of scores
    and of the logarithm of a row of one key are relative to the size of these terms.
    """
    exact = np.asarray(exact)
    assert ours.shape == exact.shape, name
    np.testing.assert_array_equal(np.isneginf(ours), np.isneginf(exact), err_msg=name)
    there = np.isfinite(exact)
    largest = np.abs(exact[there]).max(initial=0.0)
    if name in ("scores", "log_sum_exp"):
        largest = max(largest, largest_sum(case, exact_outputs))
    is_float64 = case.spec.dtype == "float64"
    tolerance = 1e-10 * max(1.0, largest) if is_float64 else 1e-5 * max(1.0, largest_score(case, exact_outputs)) * largest
    np.testing.assert_allclose(ours[there], exact[there], rtol=0, atol=tolerance, err_msg=f"{name} of {case.spec!r}")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("init", INITS)
@given(seed=SEEDS, rate=st.sampled_from([0.15, 0.35, 0.7]))
def test_random_calls_agree_with_the_reference(http: httpx.Client, init: Init, dtype: str, seed: int, rate: float) -> None:
    """All outputs at once; those with an implementation of their own also alone; and the number of fully masked rows."""
    case = random_case(np.random.default_rng(seed), features=REQUEST_FEATURES, init=init, dtype=dtype, rate=rate)
    exact = put_layer(http, case)

    for outputs in (OUTPUTS, ("output",), ("log_sum_exp",)):
        reply = attend(http, case, outputs=outputs)
        assert list(reply) == ["fully_masked_rows", *outputs]
        assert reply["fully_masked_rows"] == exact.fully_masked_rows
        for name in outputs:
            assert_close(name, reply[name], getattr(exact, name), case, exact)


@given(seed=SEEDS)
def test_reproducible_calls_agree_with_the_reference(http: httpx.Client, seed: int) -> None:
    """That they are computed alone, bit for bit, is tested in `web/routes/test_attend.py` and `serving/test_executor.py`."""
    case = random_case(np.random.default_rng(seed), features=REQUEST_FEATURES)
    exact = put_layer(http, case)

    reply = attend(http, case, outputs=("output", "attention_weights"), reproducible=True)

    for name in ("output", "attention_weights"):
        assert_close(name, reply[name], getattr(exact, name), case, exact)


@given(seed=SEEDS, data=st.data())
def test_selected_weights_agree_with_the_reference(http: httpx.Client, seed: int, data: st.DataObject) -> None:
    """Any heads and queries in any order, averaged or not, all keys or the largest, also with dropout."""
    case = random_case(np.random.default_rng(seed), features=REQUEST_FEATURES, rate=0.5)
    exact = put_layer(http, case)
    heads, queries = exact.attention_weights.shape[-3:-1]
    select: dict[str, Any] = {"average": data.draw(st.booleans())}
    for name, n in (("heads", heads), ("queries", queries)):
        if data.draw(st.booleans()):
            select[name] = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True))
    expected = exact.attention_weights[..., select.get("heads", range(heads)), :, :][..., select.get("queries", range(queries)), :]
    expected = expected.mean(-3) if select["average"] else expected

    whole = attend(http, case, outputs=("attention_weights",), select=select)["attention_weights"]
    n = data.draw(st.integers(1, expected.shape[-1] + 2))
    top = attend(http, case, outputs=("output", "attention_weights"), select={**select, "top_k": n})

    assert_close("attention_weights", whole, expected, case, exact)
    assert_close("output", top["output"], exact.output, case, exact)
    order = np.argsort(-whole, axis=-1, kind="stable")[..., :n]
    np.testing.assert_array_equal(top["attention_weights"]["keys"], order)
    np.testing.assert_array_equal(top["attention_weights"]["values"], np.take_along_axis(whole, order, -1))


@given(seed=SEEDS)
def test_loaded_weights_give_the_fingerprint_of_drawn_ones(http: httpx.Client, seed: int) -> None:
    """The weights of a seed, sent as numbers."""
    case = random_case(np.random.default_rng(seed), features=REQUEST_FEATURES)
    spec = case.spec.model_dump(mode="json")
    seeded = http.put("/layers/random", json={"spec": spec}).json()

    weights = {name: array.tolist() for name, array in documented_weights(case.spec).items()}
    given = {name: value for name, value in spec.items() if name not in ("init", "seed", "gain")}
    loaded = http.put("/layers/random", json={"spec": given, "weights": weights})

    assert loaded.status_code == 200, loaded.text
    assert loaded.json()["fingerprint"] == seeded["fingerprint"]


@given(seed=SEEDS, shift=st.floats(-3, 3), factor=st.sampled_from([1e-3, 1.0, 30.0]))
def test_large_scores_do_not_overflow(http: httpx.Client, seed: int, shift: float, factor: float) -> None:
    """Scores in the hundreds, for which a softmax that does not subtract the largest overflows."""
    drawn = random_case(np.random.default_rng(seed), features=("key", "mask", "causal", "query_offset", "bias"), init="xavier_uniform")
    case = Case(drawn.spec.model_copy(update={"softcap": None}), drawn.request)  # a cap would hide how large they are
    case.request["query"] = ((case.request["query"] + shift) * factor).astype(case.spec.dtype)
    if "key" in case.request:
        case.request["key"] = (case.request["key"] * factor).astype(case.spec.dtype)
    exact = put_layer(http, case)

    reply = attend(http, case, outputs=OUTPUTS)

    for name in OUTPUTS:
        assert_close(name, reply[name], getattr(exact, name), case, exact)
    assert_close("output", attend(http, case, outputs=("output",))["output"], exact.output, case, exact)


@pytest.mark.parametrize(("queries", "keys"), [(1, 4099), (1031, 1033), (2053, 3)])
def test_long_calls_agree_with_the_reference(http: httpx.Client, queries: int, keys: int) -> None:
    """Outputs are assembled from several blocks of rows."""
    rng = np.random.default_rng(queries)
    spec = LayerSpec(d_model=15, num_heads=5, seed=7, dtype="float64", softcap=3.0)
    request = {
        "query": rng.standard_normal((1, queries, 15)),
        "key": rng.standard_normal((1, keys, 15)),
        "window": {"left": 700, "right": 300},
        "query_offset": "end",
        "valid_lens": rng.integers(0, keys + 1, (1, queries)),
        "dropout": {"p": 0.2, "seed": 5},
    }
    case = Case(spec, request)
    exact = put_layer(http, case)

    for outputs in (("output", "log_sum_exp"), ("concatenated",)):
        reply = attend(http, case, outputs=outputs)
        assert reply["fully_masked_rows"] == exact.fully_masked_rows
        for name in outputs:
            assert_close(name, reply[name], getattr(exact, name), case, exact)
    plain = Case(spec.model_copy(update={"softcap": None}), {name: field for name, field in request.items() if name != "dropout"})
    exact = put_layer(http, plain)
    assert_close("output", attend(http, plain, outputs=("output",))["output"], exact.output, plain, exact)


@pytest.mark.parametrize(
    "rope", [{}, {"interleaved": True, "dims": 6, "theta": 5e5}, {"scaling": {"type": "linear", "factor": 4.0}}], ids=str
)
@pytest.mark.parametrize("offset", [0, 6_000, -6_000, 10_000_000, -10_000_000])
def test_rope_is_exact_at_distant_positions(http: httpx.Client, offset: int, rope: dict[str, Any]) -> None:
    """In float32 to 1e-6 of the largest value, for queries far before and after the keys, which are at 0 to 6,000."""
    rng = np.random.default_rng(0)
    spec = LayerSpec.model_validate({"d_model": 8, "num_heads": 1, "projections": False, "rope": rope})
    query, key = (rng.standard_normal((1, n, 8)).astype(np.float32) for n in (3, 6_001))
    request = {"query": query, "key": key, "query_offset": offset}
    case = Case(spec, request)
    made = http.put("/layers/random", json={"spec": spec.model_dump(mode="json")})
    assert made.is_success, made.text
    exact = forward.attend(spec, {}, **request)

    reply = attend(http, case, outputs=("query_projection", "key_projection", "scores"))

    for name in ("query_projection", "key_projection", "scores"):
        wanted = getattr(exact, name)
        assert np.abs(reply[name] - wanted).max() <= 1e-6 * np.abs(wanted).max(), name


@pytest.mark.parametrize(
    ("dtype", "offset", "tolerance"), [("float64", 10_000_000, 1e-7), ("float32", 4_096, 1e-3), ("float32", -4_096, 1e-3)]
)
def test_alibi_at_distant_positions(http: httpx.Client, dtype: Any, offset: int, tolerance: float) -> None:
    """A bias of slope · distance is added to each score, so its rounding, 2^-24 of it in float32, is that of the score."""
    rng = np.random.default_rng(0)
    case = Case(
        LayerSpec(d_model=4, num_heads=2, alibi=True, dtype=dtype), {"query": rng.standard_normal((1, 1031, 4)), "query_offset": offset}
    )
    exact = put_layer(http, case)

    for outputs in (("output",), ("output", "log_sum_exp")):
        np.testing.assert_allclose(attend(http, case, outputs=outputs)["output"], exact.output, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16"])
@given(seed=SEEDS)
def test_any_layer_agrees_with_the_reference(client: Client, dtype: str | None, seed: int) -> None:
    """Every output of a random call to a random layer, and the output alone, which another kernel may compute."""
    case = random_case(np.random.default_rng(seed), rate=0.4, dtype=dtype)
    client.put_layer("operator", case.spec, case.weights)
    weights = weights_of(case)
    exact, rounded = forward.attend(case.spec, weights, **case.request), with_roundings(case, weights)

    result = client.attend(**case.request, layer="operator", outputs=compared_outputs(case.spec))
    alone = client.attend(**case.request, layer="operator", outputs=["output"])

    for reply in (result, {**result, "output": alone["output"]}):
        wrong = [finding for finding in compare_reply(case, exact, reply, result.fully_masked_rows, rounded) if not finding.agrees]
        assert wrong == [], case.spec


@given(seed=SEEDS)
def test_gradients_agree_with_finite_differences(client: Client, seed: int) -> None:
    """Along random directions of each of the three inputs, for random float64 layers."""
    agree_with_finite_differences(client, random_case(np.random.default_rng(seed), dtype="float64", init="xavier_uniform"), seed)


@given(seed=st.integers(0, 2**32 - 1))
def test_a_layer_is_freed_with_its_last_reference(seed: int) -> None:
    """A cycle would keep the weights of a replaced layer until a garbage collection, which may be gigabytes later."""
    case = random_case(np.random.default_rng(seed), features=LAYER_FEATURES)
    dtype = getattr(torch, case.spec.dtype)
    weights = {name: torch.from_numpy(np.array(x, np.float32)).to(dtype) for name, x in weights_of(case).items()}
    gc.disable()
    try:
        layer = MultiHeadAttention(case.spec, weights, torch.device("cpu"))
        parts = [weakref.ref(part) for part in (layer, layer.arithmetic, *layer.kernels)]
        del layer
        assert [part() for part in parts if part() is not None] == []
    finally:
        gc.enable()
