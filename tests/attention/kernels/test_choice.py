"""The kernels that `attend families --kernels` names: that these and no others run, and that they compute what the steps do."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from attend.attention.decoding import CachedForwardPass, forward_cached
from attend.attention.kernels.choice import CALLS, STEPS, kernels_of
from attend.attention.kernels.fusion import Kernel
from attend.attention.layer import MultiHeadAttention
from attend.attention.native.extension import extension
from attend.attention.reference.forward import attend
from attend.check.random_cases import Case
from attend.checkpoints.families.examples import examples
from attend.serving.calls import make_call
from attend.spec import LayerSpec
from attend.wire.problems import validate
from attend.wire.schemas.attend import AttendRequest
from support.decoding import Sequence

ROWS = 7
REQUESTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "causal": {"causal": True},
    "masked": {"attend_mask": np.tri(ROWS, dtype=bool) | np.eye(ROWS, k=3, dtype=bool)},
}


def chosen() -> dict[str, LayerSpec]:
    """One layer for each set of operators and kernels that the families have, by the model type of the first."""
    found: dict[tuple[Any, ...], str] = {}
    specs = {}
    for family, layers in examples().items():
        for i, example in enumerate(layers):
            spec = LayerSpec.model_validate(example["spec"])
            kind = (*(operator.field for operator in spec.operators), *kernels_of(spec).values())
            if kind not in found:
                found[kind] = f"{family}-{i}"
                specs[f"{family}-{i}"] = spec
    return specs


EXAMPLES = chosen()
each_example = pytest.mark.parametrize("spec", EXAMPLES.values(), ids=EXAMPLES)


def drawn_case(spec: LayerSpec) -> Case:
    """Random weights, and a request with a key and a value where the layer needs them."""
    rng = np.random.default_rng(len(spec.weight_shapes()))
    weights = {name: rng.standard_normal(shape).astype(np.float32) / 3 for name, shape in spec.weight_shapes().items()}
    inputs = {"query": rng.standard_normal((ROWS, spec.query_dim)).astype(np.float32)}
    if (spec.key_dim, spec.value_dim) != (spec.query_dim, spec.query_dim):
        inputs |= {name: rng.standard_normal((ROWS, getattr(spec, f"{name}_dim"))).astype(np.float32) for name in ("key", "value")}
    return Case(spec, inputs, weights)


def record(layer: MultiHeadAttention) -> list[str]:
    """A list to which each kernel of the layer adds its name whenever it has computed a value."""
    computed: list[str] = []

    def recorded(kernel: Kernel, compute: Callable[..., Any]) -> Callable[..., Any]:
        def run(**values: Any) -> Any:
            result = compute(**values)
            computed.append(kernel.name)
            return result

        return run

    for kernel in (*layer.kernels, *layer.cache_kernels):
        kernel.compute = recorded(kernel, kernel.compute)  # type: ignore[method-assign]
    return computed


@each_example
@pytest.mark.parametrize("kind", REQUESTS)
def test_the_named_kernel_computes_calls(spec: LayerSpec, kind: str) -> None:
    """And no other; its output is that of the steps."""
    case = drawn_case(spec)
    assert case.weights is not None
    layer = MultiHeadAttention(spec, {name: torch.from_numpy(x) for name, x in case.weights.items()}, torch.device("cpu"))
    call = make_call(validate(AttendRequest, {**case.request, **REQUESTS[kind], "outputs": ["output"]}), spec)
    computed = record(layer)

    got = layer.attend(call).tensors["output"]

    assert {*computed} == {kernels_of(spec)[kind]} - {STEPS}
    computed.clear()
    expected = layer.attend(call, exact=True).tensors["output"]
    assert computed == []
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * max(1.0, float(expected.abs().max())))


@pytest.mark.skipif(extension is None, reason="the kernel of pages is in C")
@each_example
def test_the_named_kernel_computes_steps_of_sessions(spec: LayerSpec) -> None:
    """One query for the rows of a cache; its output is that of the float64 reference."""
    rng = np.random.default_rng(3)
    sequence = Sequence(drawn_case(spec))
    sequence.step(sequence.draw(rng, 3, 3))
    computed = record(sequence.layer.attention)
    members = {**sequence.draw(rng, 1, 1), "causal": True, "outputs": ["output"]}
    start, prepared = sequence.length, sequence.prepare(members)
    assert isinstance(prepared.operation, CachedForwardPass)

    (result,) = forward_cached(sequence.layer.attention, [(prepared.operation, prepared.call)])

    sequence.keep(members)
    sequence.check(result, members, start)
    assert {*computed} == {kernels_of(spec)["session"]} - {STEPS}


@pytest.mark.parametrize(("rows", "kernel"), [(5, "causal sdpa"), (7, "sdpa")], ids=["selected", "some selected"])
def test_keys_are_selected_only_among_more_than_top_k(rows: int, kernel: str) -> None:
    """A causal call of at most `top_k` keys has the kernel of a layer without an indexer; its output is that of the float64 reference."""
    latent = {"query_rank": 11, "key_value_rank": 13, "rope_key_dim": 2}
    indexer = {"num_heads": 2, "head_dim": 5, "top_k": 5}
    spec = LayerSpec(d_model=15, num_heads=3, rope={"dims": 2}, latent=latent, indexer=indexer)
    case = drawn_case(spec)
    assert case.weights is not None
    layer = MultiHeadAttention(spec, {name: torch.from_numpy(x) for name, x in case.weights.items()}, torch.device("cpu"))
    request = {"query": case.request["query"][:rows], "causal": True}
    computed = record(layer)

    got = layer.forward(make_call(validate(AttendRequest, {**request, "outputs": ["output"]}), spec)).tensors["output"]

    assert computed == [kernel]
    np.testing.assert_allclose(got[0], attend(spec, case.weights, **request).output, rtol=0, atol=1e-5)


def test_the_examples_have_every_kernel() -> None:
    """Fused kernels of calls and of caches, and layers without one."""
    named = {(kind, kernel) for spec in EXAMPLES.values() for kind, kernel in kernels_of(spec).items()}
    assert named >= {(kind, name) for kind in CALLS for name in ("sdpa", STEPS)} | {("causal", "causal sdpa"), ("session", "pages")}
