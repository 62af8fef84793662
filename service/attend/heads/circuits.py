"""The QK and OV circuits of a layer's heads (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits").

    scores of rows x and y:     x^T (scale W_Q^T W_K) y         output of a head for the row y:     W_O W_V y

Both matrices have the rank of a head, so neither is formed: with A B of A [m, d] and B [d, n], the singular values are those of R_A R_B^T,
where A = Q_A R_A and B^T = Q_B R_B, and the eigenvalues other than 0 are those of B A [d, d]. Positions, biases, norms, gates and what
mixes heads are left out: with RoPE, the QK circuit is that of rows at the same position.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attend.attention.call import Call, Result
from attend.attention.layer import MultiHeadAttention
from attend.attention.operations import Operation
from attend.errors import InvalidRequest, TooLarge
from attend.spec import LayerSpec

MATRICES = ("query.weight", "key.weight", "value.weight", "output.weight")
MAX_WIDTH = 512  # of a head: nothing stops LAPACK, which takes up to a second for the eigenvalues of such a matrix


@dataclass(frozen=True, slots=True)
class CircuitsOperation(Operation):
    """The operation that computes the circuits of some heads of the layer, on the CPU. It needs no call."""

    heads: range

    @torch.inference_mode()
    def run(self, layer: MultiHeadAttention, call: Call | None) -> Result:
        return Result(circuits(layer.spec, {name: layer.weights[name].cpu() for name in MATRICES}, self.heads))


def require_circuits(spec: LayerSpec) -> None:
    """Raises InvalidRequest if the scores or the outputs of a head are no product of two matrices, TooLarge for heads above MAX_WIDTH."""
    expected = "a layer whose heads each have one matrix for queries, keys, values and outputs"
    if not spec.projections:
        raise InvalidRequest.where("", expected, "a layer without projections")
    for operator in spec.operators:
        if operator.num_softmaxes > 1 or "project" in operator.steps(spec):
            raise InvalidRequest.where("", expected, f"a layer with {operator.field}")
    if (widest := max(spec.head_dim, spec.value_head_dim)) > MAX_WIDTH:
        raise TooLarge.where("", f"a layer whose heads have at most {MAX_WIDTH} numbers", str(widest))


def circuits(spec: LayerSpec, weights: Mapping[str, Tensor], heads: range) -> dict[str, Tensor]:
    """The numbers of each of `heads`, h in all, in float64, of a layer that `require_circuits` accepts. `weights` has MATRICES by name.

    `qk_singular_values` [h, n] of scale W_Q^T W_K and `ov_singular_values` [h, n] of W_O W_V, largest first. `matching_score` and
    `copying_score` [h]: the sum of the eigenvalues of these matrices over the sum of their magnitudes, from -1 to 1; NaN if the matrix
    is not square, or 0.
    """
    own = list(heads)
    shared = [head * spec.num_kv_heads // spec.num_heads for head in heads]  # their heads of keys and values
    query = weights["query.weight"].view(spec.num_heads, spec.head_dim, -1)[own].double() * spec.scale  # [h, d, d_model]
    key = weights["key.weight"].view(spec.num_kv_heads, spec.head_dim, -1)[shared].double()  # [h, d, key_dim]
    value = weights["value.weight"].view(spec.num_kv_heads, spec.value_head_dim, -1)[shared].double()  # [h, dv, value_dim]
    output = weights["output.weight"].view(spec.output_dim, spec.num_heads, -1)[:, own].double().transpose(0, 1)  # [h, output_dim, dv]
    qk_values, matching = _product_spectrum(query.transpose(1, 2), key)
    ov_values, copying = _product_spectrum(output, value)
    return {"qk_singular_values": qk_values, "matching_score": matching, "ov_singular_values": ov_values, "copying_score": copying}


def _product_spectrum(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Of A B for A [h, m, d] and B [h, d, n]: the singular values [h, min(m, d, n)], and the sum of the eigenvalues over that of
    their magnitudes [h]."""
    sizes = [x.abs().amax((1, 2)).clamp(min=torch.finfo(x.dtype).tiny) for x in (left, right)]
    left, right = (x / size[:, None, None] for x, size in zip((left, right), sizes, strict=True))  # so that no product overflows
    factors = torch.linalg.qr(left, mode="r").R @ torch.linalg.qr(right.transpose(1, 2), mode="r").R.transpose(1, 2)
    values = torch.linalg.svdvals(factors) * sizes[0][:, None] * sizes[1][:, None]
    if left.shape[1] != right.shape[2]:
        return values, torch.full_like(sizes[0], torch.nan)
    eigenvalues = torch.linalg.eigvals(right @ left)
    return values, eigenvalues.real.sum(-1) / eigenvalues.abs().sum(-1)
