"""Each kernel computes what it declares; every other field of a layer and option of a call sends the call to eager attention."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from attend.attention.call import SCORED, Call, CallOptions
from attend.attention.kernels.choose import choose
from attend.attention.kernels.declaration import EXTERNAL_FIELDS, OUTER_FIELDS, fields_of, options_of
from attend.attention.kernels.eager import Eager
from attend.attention.kernels.pages import PagesKernel
from attend.attention.kernels.sdpa import SdpaKernel
from attend.attention.kernels.short import ShortKernel
from attend.attention.layer import MultiHeadAttention
from attend.attention.masks import Masks
from attend.attention.operations import FORWARD, forward_pass
from attend.attention.operators import OPERATORS
from attend.attention.reference import forward
from attend.check.random_cases import Draw
from attend.spec import LayerSpec
from support import calls

CPU = torch.device("cpu")
PLAIN = {"d_model": 32, "num_heads": 2}
KERNELS = (ShortKernel, PagesKernel, SdpaKernel)  # and Eager, which computes everything
# A value other than the default of each field that a kernel has to know.
FIELDS: dict[str, Any] = {
    operator.field: operator.random(Draw(np.random.default_rng(0)), {**LayerSpec(**PLAIN).model_dump(), "drawn": (), "num_softmaxes": 1})
    for operator in reversed(OPERATORS)
    if operator.field not in EXTERNAL_FIELDS
}


# Fields of a call that no kernel has to compute; `options_of` has the others.
# fmt: off
EXTERNAL_OPTIONS = {
    "items", "num_queries", "num_keys", "self_attention", "keys_as_values", "query", "key", "value", "masks",
    "scale", "outputs", "query_coordinates", "key_coordinates", "heads", "queries", "average", "top_k", "is_part",
    "fully_masked", "cached", "pattern_rows", "head_output_rows",
}
# fmt: on


def call_of(**options: Any) -> Call:
    x = torch.ones(1, 5, 32)
    return calls.call_of(x, x, x, options.pop("masks", masks()), 0.25, frozenset({"output"}), **options)


def masks(**fields: Any) -> Masks:
    return Masks(torch.arange(5)[None], 5, aligned=True, **fields)


CALLS = {
    "softcap": call_of(softcap=2.0),
    "dropout": call_of(dropout=(0.5, 1)),
    "reproducible": call_of(reproducible=True),
    "gradients": call_of(output_gradient=torch.ones(1, 5, 32)),
    "head_scale": call_of(head_scale=torch.ones(1, 2, 1, 1)),
    "pattern": call_of(pattern=torch.ones(1, 1, 5, 5)),
    "head_outputs": call_of(head_outputs=torch.ones(1, 2, 5, 16)),
    "bias": call_of(masks=masks(bias=torch.zeros(1, 1, 5, 5))),
    "intervals": call_of(masks=masks(right=0)),
    "sets": call_of(masks=masks(attend_keys=torch.ones(1, 5, dtype=torch.bool))),
    "uniform_rows": call_of(masks=masks(lengths=torch.tensor([[0]])), fully_masked="uniform"),
}


def test_every_field_of_a_spec_is_external_or_has_to_be_declared() -> None:
    """A new field must be added to FIELDS, or, if no kernel has to compute it, to EXTERNAL_FIELDS."""
    assert set(LayerSpec.model_fields) == EXTERNAL_FIELDS | set(FIELDS)
    for kernel in KERNELS:
        assert kernel.declaration.fields <= set(FIELDS)
    assert set(FIELDS) >= OUTER_FIELDS


def test_every_field_of_a_call_is_external_or_an_option() -> None:
    """A new field must be added to `options_of`, or, if no kernel has to compute it, to EXTERNAL_OPTIONS."""
    named = {field.name for made in (Call, CallOptions) for field in fields(made)} - {"options"}
    assert named == EXTERNAL_OPTIONS | {*("softcap", "dropout", "reproducible", "output_gradient", "head_scale", "pattern", "head_outputs")}
    for option, call in CALLS.items():
        assert option in options_of(call)
    assert {name for call in CALLS.values() for name in options_of(call)} == set(CALLS)
    assert not options_of(call_of())
    for kernel in KERNELS:
        assert kernel.declaration.options <= set(CALLS)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("field", FIELDS)
def test_a_layer_with_a_field_that_a_kernel_does_not_declare_has_no_such_kernel(field: str, kernel: Any) -> None:
    spec = LayerSpec.model_construct(**{**LayerSpec(**PLAIN).model_dump(), field: FIELDS[field]})
    assert fields_of(spec) == {field}
    assert kernel.declaration.has_layer(spec, CPU) is (field in kernel.declaration.fields)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_field_that_nobody_declares_is_not_ignored(kernel: Any) -> None:
    class Extended(LayerSpec):
        novelty: float = 0.0

    assert kernel.declaration.has_layer(Extended(**PLAIN), CPU)
    assert not kernel.declaration.has_layer(Extended(**PLAIN, novelty=1.0), CPU)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("option", CALLS)
def test_a_call_with_an_option_that_a_kernel_does_not_declare_goes_elsewhere(option: str, kernel: Any) -> None:
    asked = options_of(CALLS[option])
    assert kernel.declaration.has_call(CALLS[option], frozenset()) is (asked <= kernel.declaration.options)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_kernels_in_c_are_for_float32(dtype: str) -> None:
    spec = LayerSpec(**PLAIN, dtype=dtype)
    assert [kernel.declaration.has_layer(spec, CPU) for kernel in KERNELS] == [dtype == "float32", dtype == "float32", True]
    assert not ShortKernel.declaration.has_layer(spec, torch.device("meta"))


@pytest.mark.parametrize("option", CALLS)
def test_eager_attention_computes_what_no_other_kernel_declares(option: str) -> None:
    assert Eager.declaration.has_layer(LayerSpec.model_construct(**{**LayerSpec(**PLAIN).model_dump(), **FIELDS}), CPU)
    assert Eager.declaration.has_call(CALLS[option], SCORED | {"head_outputs"})
    layer = MultiHeadAttention(LayerSpec(**PLAIN), {n: torch.ones(s) / 32 for n, s in LayerSpec(**PLAIN).weight_shapes().items()}, CPU)
    assert layer.kernels[-1] is layer.eager


def test_the_kernel_of_a_forward_pass_is_chosen_once() -> None:
    """It computes later calls with equal options; what it cannot compute is left to the layer."""
    layer = MultiHeadAttention(LayerSpec(**PLAIN), {n: torch.ones(s) / 32 for n, s in LayerSpec(**PLAIN).weight_shapes().items()}, CPU)
    computed = iter(({"output": torch.zeros(1)}, None))

    class Twice:
        declaration = ShortKernel.declaration

        def suits(self, call: Call) -> bool:
            return True

        def compute(self, *_: Any) -> dict[str, torch.Tensor] | None:
            return next(computed)

    call, wanted = call_of(), layer.forward(call_of()).tensors["output"]
    layer.call_kernels = (Twice(),)
    operation = forward_pass(layer, call)
    assert forward_pass(layer, CALLS["softcap"]) is FORWARD
    layer.call_kernels = ()
    assert forward_pass(layer, call) is FORWARD
    assert torch.equal(operation.run(layer, call).tensors["output"], torch.zeros(1))
    torch.testing.assert_close(operation.run(layer, call).tensors["output"], wanted, rtol=0, atol=1e-5)


def test_kernels_that_return_nothing_pass_a_call_on() -> None:
    class Unable(SdpaKernel):
        def compute(self, *_: Any) -> None:
            return None

    layer = MultiHeadAttention(LayerSpec(**PLAIN), {n: torch.ones(s) / 32 for n, s in LayerSpec(**PLAIN).weight_shapes().items()}, CPU)
    layer.call_kernels, layer.kernels = (), (Unable(layer.eager), layer.eager)
    call = call_of()
    got = layer.forward(call).tensors["output"]
    weights = {name: x.double().numpy() for name, x in layer.weights.items()}
    wanted = forward.attend(layer.spec, weights, query=call.query.double().numpy()).output
    np.testing.assert_allclose(got.numpy(), wanted, rtol=0, atol=1e-5)
    assert list(choose(layer.kernels, call, frozenset({"head_outputs"}))) == [*layer.kernels]
    assert list(choose(layer.kernels, call, frozenset({"scores", "head_outputs"}))) == [layer.eager]
