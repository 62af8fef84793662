"""Kernels replace steps of a program that they declare, and no others: by the numbers of what a layer computes with and without them."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attend.attention.call import Call, Result
from attend.attention.dataflow import needed
from attend.attention.kernels.fusion import Inexact, fuse
from attend.attention.kernels.pages import PagesKernel
from attend.attention.kernels.sdpa import CausalSdpaKernel, SdpaKernel
from attend.attention.kernels.short import ShortKernel
from attend.attention.layer import MultiHeadAttention
from attend.attention.operations import FORWARD, forward_pass
from attend.attention.operators import OPERATORS
from attend.attention.operators.operator import Operator
from attend.attention.operators.step import Step, Value
from attend.attention.program import program_of
from attend.serving.calls import make_call
from attend.spec import LayerSpec
from attend.wire.problems import validate
from attend.wire.schemas.attend import AttendRequest
from support.cases import weights_of
from support.layers import call_of, make, rows_masks
from support.operator_cases import case_with

CPU = torch.device("cpu")
PLAIN = {"d_model": 32, "num_heads": 2}


def fused(layer: MultiHeadAttention, call: Call, *wanted: str) -> list[str]:
    """The kernels that compute the wanted values of a call."""
    plans = {kernel.name: layer.plan(call.features, wanted, (), kernel) for kernel in layer.kernels}
    return [name for name, plan in plans.items() if plan is not None]


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(["float64", "float32"]))
def test_kernels_compute_what_the_steps_compute(operator: type[Operator], dtype: str, seed: int) -> None:
    """Every output that follows from the heads, of random calls of layers with the operator, by each kernel that takes them."""
    case = case_with(operator, seed, dtype)
    weights = {name: torch.from_numpy(np.asarray(x, dtype)) for name, x in weights_of(case).items()}
    layer = MultiHeadAttention(case.spec, weights, CPU)
    call = make_call(validate(AttendRequest, {**case.request, "outputs": ["output", "head_outputs", "concatenated"]}), case.spec)

    got, plain = layer.attend(call).tensors, layer.attend(call, exact=True).tensors

    for name, expected in plain.items():
        finite = expected[expected.isfinite()]
        tolerance = {"float64": 1e-11, "float32": 1e-4}[dtype] * max(1.0, float(finite.abs().max()) if finite.numel() else 1.0)
        torch.testing.assert_close(got[name], expected, rtol=0, atol=tolerance, equal_nan=True)


def assert_same_output(layer: MultiHeadAttention, call: Call) -> None:
    """With and without kernels."""
    got, plain = (layer.attend(call, exact=exact).tensors["output"] for exact in (False, True))
    torch.testing.assert_close(got, plain, rtol=0, atol=1e-5)


def calls_of(layer: MultiHeadAttention) -> dict[str, Call]:
    """Calls with each feature alone."""
    rows = 7
    heads, pairs = (1, layer.spec.num_heads, rows, layer.spec.value_head_dim), (1, 1, rows, rows)
    fields: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"masks": rows_masks(rows, right=0, aligned=True)},
        "intervals": {"masks": rows_masks(rows, left=2, aligned=True)},
        "lengths": {"masks": rows_masks(rows, lengths=torch.tensor([[3], [5]]))},
        "sets": {"masks": rows_masks(rows, attend_mask=torch.eye(rows, dtype=torch.bool)[None, None])},
        "bias": {"masks": rows_masks(rows, bias=torch.randn(pairs))},
        "bias and causal": {"masks": rows_masks(rows, bias=torch.randn(pairs), right=0, aligned=True)},
        "softcap": {"softcap": 2.0},
        "dropout": {"dropout": (0.5, 1)},
        "pattern": {"pattern": torch.full(pairs, 0.25)},
        "head_scale": {"head_scale": torch.tensor([0.5, 2.0]).view(1, 2, 1, 1)},
        "other heads": {"head_outputs": torch.ones(heads), "head_output_rows": torch.tensor([True, False]).view(1, 2, 1, 1)},
        "uniform": {"masks": rows_masks(rows, lengths=torch.tensor([[0], [5]])), "fully_masked": "uniform"},
    }
    return {name: call_of(layer, 2, rows, outputs=frozenset({"output"}), **field) for name, field in fields.items()}


# The kernels that may compute each of these calls, the first that is tried first
KERNELS = {
    "causal": ["causal sdpa", "sdpa"],
    **{name: ["sdpa"] for name in ("plain", "intervals", "lengths", "sets", "bias", "bias and causal", "head_scale", "other heads")},
    **{name: [] for name in ("softcap", "dropout", "pattern", "uniform")},
}


def test_each_feature_of_a_call_has_the_expected_kernels() -> None:
    layer, _ = make(**PLAIN)
    for name, call in calls_of(layer).items():
        assert fused(layer, call, "output") == KERNELS[name], name
        assert fused(layer, call, "output", "scores") == fused(layer, call, "attention_weights") == []
        torch.testing.assert_close(
            layer.attend(call).tensors["output"], layer.attend(call, exact=True).tensors["output"], rtol=0, atol=1e-5
        )


def test_a_step_that_no_kernel_declares_is_not_ignored() -> None:
    """It stands between two steps that kernels fuse, and changes the scores; or reads what they would not compute."""
    spec = LayerSpec(**PLAIN)
    program = needed(program_of(spec), {"output"})
    at = next(i for i, step in enumerate(program) if step.name == "softmax")
    novel = Step("novel", ("scores",), {"scores": Value("b,h,q,k")}, "S = S²", lambda m, scores: scores**2)
    reader = Step("reader", ("attention_weights",), {"head_outputs": Value("b,h,q,value_head_dim")}, "", lambda m, weights: weights)
    causal = needed(program_of(spec, {"causal"}), {"output"})
    for kernel in (SdpaKernel(spec), CausalSdpaKernel(spec), PagesKernel(spec)):
        assert fuse(causal, kernel, {"output"}) is not None
        assert (fuse(program, kernel, {"output"}) is None) is (kernel.name == "causal sdpa")
        assert fuse((*program[:at], novel, *program[at:]), kernel, {"output"}) is None
        assert fuse((*program, reader), kernel, {"head_outputs"}) is None
    assert {step.name for step in program} <= ShortKernel.fuses
    assert "novel" not in ShortKernel.fuses


def test_the_indexer_chooses_keys_for_fused_kernels() -> None:
    """Its steps make a mask, which kernels take like any other."""
    indexer = {"num_heads": 2, "head_dim": 8, "top_k": 3}
    layer, _ = make(**PLAIN, indexer=indexer, init="xavier_uniform")
    call = call_of(layer, 2, 11, outputs=frozenset({"output"}), masks=rows_masks(11, right=0, aligned=True))
    assert fused(layer, call, "output") == ["sdpa"]
    assert_same_output(layer, call)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_kernels_in_c_are_for_float32(dtype: str) -> None:
    spec = LayerSpec(**PLAIN, dtype=dtype)
    weights = {name: torch.ones(shape, dtype=getattr(torch, dtype)) for name, shape in spec.weight_shapes().items()}
    layer = MultiHeadAttention(spec, weights, CPU)
    assert (layer.short is not None) <= (dtype == "float32")
    assert bool(layer.cache_kernels) <= (dtype == "float32")
    assert len(layer.kernels) == 2


def test_whether_a_forward_pass_is_short_is_decided_once() -> None:
    """It computes later calls with equal options; what it cannot compute is left to the layer."""
    layer, plain = make(**PLAIN)
    call, computed = call_of(layer, 1, 5, outputs=frozenset({"output"})), iter((Result({"output": torch.zeros(1)}), None))

    class Twice:
        def computes(self, call: Call) -> bool:
            return call.options.softcap is None

        def is_short(self, call: Call) -> bool:
            return True

        def compute(self, call: Call, masked: bool) -> Any:
            return next(computed)

    layer.short = Twice()  # type: ignore[assignment]
    operation = forward_pass(layer, call)
    assert forward_pass(layer, call.with_options(softcap=2.0)) is FORWARD
    layer.short = None
    assert forward_pass(layer, call) is FORWARD
    assert torch.equal(operation.run(layer, call).tensors["output"], torch.zeros(1))
    torch.testing.assert_close(operation.run(layer, call).tensors["output"], plain.forward(call).tensors["output"], rtol=0, atol=1e-5)


def test_a_kernel_that_cannot_compute_a_call_exactly_passes_it_on() -> None:
    class Unable(SdpaKernel):
        def compute(self, **values: Any) -> Any:
            raise Inexact

    layer, _ = make(**PLAIN)
    layer.kernels = (Unable(layer.spec),)
    call = call_of(layer, 2, 300, outputs=frozenset({"output"}))
    assert_same_output(layer, call)
