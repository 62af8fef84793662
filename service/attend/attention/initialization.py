"""Draws the seeded weights of a spec on the CPU, without changing a global random state.

The NumPy schemes draw from `RandomState`, whose streams NumPy guarantees not to change. The torch schemes
repeat the draws of torch's modules, in their order, with a separate generator; their stability is that of torch.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch.nn.init import kaiming_uniform_, xavier_uniform_

from attend.attention.operators import OPERATORS
from attend.errors import InvalidRequest
from attend.spec import LayerSpec
from attend.spec_parts import PROJECTIONS
from attend.tensors import BY_TORCH, Array

Weights = dict[str, Array]
DRAWN_MATRICES = (*PROJECTIONS, *(name for operator in OPERATORS for name in operator.matrices))  # in this order
DRAWN = {f"{name}.weight" for name in DRAWN_MATRICES}


def draw_weights(spec: LayerSpec) -> Weights:
    """Canonical name -> array in the spec's dtype, C-contiguous. The same spec gives the same weights.

    Raises InvalidRequest if the spec has no init, or a gain that makes weights infinite.
    """
    if spec.init is None:
        raise InvalidRequest.where("/spec/init", "a way to draw the weights, since none are given", "null")
    drawn = SCHEMES[spec.init](spec) if spec.projections else {}
    if spec.gain == 1:
        return in_dtype(spec, _constants(spec) | drawn)
    with np.errstate(over="ignore"):
        weights = in_dtype(spec, _constants(spec) | {name: array * spec.gain for name, array in drawn.items()})
    if not all(np.isfinite(array).all() for array in weights.values()):
        raise InvalidRequest.where("/spec/gain", f"a factor whose weights are finite in {spec.dtype}", str(spec.gain))
    return weights


def in_dtype(spec: LayerSpec, weights: Mapping[str, Array]) -> Weights:
    """The weights of the spec, and no others, C-contiguous in its dtype."""
    dtype = BY_TORCH[spec.dtype].numpy
    return {name: np.ascontiguousarray(weights[name], dtype=dtype) for name in spec.weight_shapes()}


def _drawn_shapes(spec: LayerSpec) -> dict[str, tuple[int, ...]]:
    """Projection -> shape [out, in] of its matrix, in the order in which the matrices are drawn."""
    shapes = spec.weight_shapes()
    return {name: shapes[f"{name}.weight"] for name in DRAWN_MATRICES if f"{name}.weight" in shapes}


def _constants(spec: LayerSpec) -> Weights:
    """Default values of the weights that are not drawn: norms 1; others 0, such as biases, unless their operator says otherwise."""
    shapes = spec.weight_shapes().items()
    constants = {name: np.full(shape, float(name.endswith("norm.weight")), np.float32) for name, shape in shapes if name not in DRAWN}
    for operator in spec.operators:
        constants |= operator.initial_weights(spec)
    return constants


def _xavier_uniform(spec: LayerSpec) -> Weights:
    """Glorot & Bengio 2010, per matrix: uniform in ±sqrt(6 / (in + out)); one stream in the order of DRAWN_MATRICES."""
    stream = np.random.RandomState(spec.seed)
    return {
        f"{name}.weight": ((stream.random_sample(shape) * 2 - 1) * math.sqrt(6 / sum(shape))).astype(np.float32)
        for name, shape in _drawn_shapes(spec).items()
    }


def _numpy(spec: LayerSpec) -> Weights:
    """Square matrices W that are applied as `x @ W`, as in tutorials; the canonical weight is W transposed."""
    stream = np.random.RandomState(spec.seed)
    draw = stream.randn if spec.init == "numpy_normal" else stream.rand
    return {f"{name}.weight": draw(spec.d_model, spec.d_model).T for name in PROJECTIONS}


def _linear(name: str, shape: tuple[int, ...], bias: bool, generator: torch.Generator) -> Weights:
    """torch.nn.Linear.reset_parameters: weight, then bias, both uniform in ±1/sqrt(in)."""
    weights: Weights = {f"{name}.weight": kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=generator).numpy()}
    if bias:
        bound = 1 / math.sqrt(shape[1])
        weights[f"{name}.bias"] = torch.empty(shape[0]).uniform_(-bound, bound, generator=generator).numpy()
    return weights


def _generator(spec: LayerSpec) -> torch.Generator:
    assert spec.seed is not None
    return torch.Generator().manual_seed(spec.seed)


def _torch_linear(spec: LayerSpec) -> Weights:
    generator, all_shapes = _generator(spec), spec.weight_shapes()
    weights: Weights = {}
    for name, shape in _drawn_shapes(spec).items():
        weights |= _linear(name, shape, f"{name}.bias" in all_shapes, generator)
    return weights


def _torch_mha(spec: LayerSpec) -> Weights:
    """torch.nn.MultiheadAttention: the output projection's draws come first (its bias is drawn, then zeroed), then Xavier on the
    packed [3E, E] input projection, or on each matrix where the widths differ."""
    generator, shapes, d = _generator(spec), _drawn_shapes(spec), spec.d_model
    output = _linear("output", shapes["output"], spec.has_bias("output"), generator)
    if spec.key_dim == spec.value_dim == d:
        matrices = list(xavier_uniform_(torch.empty(3 * d, d), generator=generator).view(3, d, d))
    else:
        matrices = [xavier_uniform_(torch.empty(shapes[name]), generator=generator) for name in PROJECTIONS[:3]]
    weights = {f"{name}.weight": matrix.numpy() for name, matrix in zip(PROJECTIONS, matrices, strict=False)}
    return weights | {"output.weight": output["output.weight"]}


SCHEMES: dict[str, Callable[[LayerSpec], Weights]] = {
    "xavier_uniform": _xavier_uniform,
    "numpy_normal": _numpy,
    "numpy_uniform": _numpy,
    "torch_linear": _torch_linear,
    "torch_mha": _torch_mha,
}
