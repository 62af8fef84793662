"""Contributions of heads to the output, and the effect of removing heads. They have a closed form, since

    y = sum_h y_h + b,   y_h = O_h W_h^T

is linear in a factor xi_h before each y_h. So dL/dxi_h = <dL/dy, y_h> exactly, and the change of y when heads are removed or replaced
follows from the products <y_i, y_j>. These are computed from O^T O and W^T W, so y_h is never stored. Sums are in float64 over the rows
that count for any head. Without such rows the metrics are NaN, and the heads of the pruning order are -1.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Products:
    """Inner products of the heads' contributions over one item's rows."""

    heads: Tensor  # [b, h, h]: <y_i, y_j>
    bias: Tensor  # [b, h]: <b, y_h>
    bias_square: Tensor  # [b]
    to_direction: Tensor  # [b, h]: <G, y_h> for the direction G, by default y; NaN if no row counts
    mean_square: Tensor  # [b, h]: number of the head's rows * |mean y_h|^2
    output_to_mean: Tensor  # [b, h]: <y, mean y_h> over the rows of the head
    counted: Tensor  # bool [b]: whether any row counts

    @property
    def to_output(self) -> Tensor:
        """[b, h]: <y, y_h>."""
        return self.heads.sum(-1) + self.bias

    @property
    def output_square(self) -> Tensor:
        """[b]: |y|^2."""
        return self.heads.sum((1, 2)) + 2 * self.bias.sum(1) + self.bias_square


def contribution_products(heads: Tensor, counts: Tensor, weight: Tensor | None, bias: Tensor | None, direction: Tensor | None) -> Products:
    """The products from head outputs [b, h, q, d], counted rows [b, h, q], and the output projection [out, h * d] (None: identity)."""
    b, h, _, d = heads.shape
    any_counts = counts.any(1)  # [b, q]
    outputs = heads.double().masked_fill(~counts[..., None], 0).transpose(1, 2).flatten(2)  # [b, q, h * d]
    weight = torch.eye(h * d, dtype=torch.float64, device=heads.device) if weight is None else weight.double()
    bias = torch.zeros(len(weight), dtype=torch.float64, device=heads.device) if bias is None else bias.double()
    weight_products = weight.T @ weight  # [h * d, h * d]
    inner = ((outputs.transpose(1, 2) @ outputs) * weight_products).view(b, h, d, h, d).sum((2, 4))
    to_bias = (outputs.sum(1) * (bias @ weight)).view(b, h, d).sum(-1)
    bias_square = any_counts.sum(1) * bias.square().sum()
    rows = counts.double()
    sums = (rows @ outputs).view(b, h, h, d)  # [b, i, j, d]: O_j over the rows of head i
    own_sums = sums.diagonal(dim1=1, dim2=2).transpose(1, 2)  # [b, h, d]
    num_rows = rows.sum(-1)  # [b, h]
    mean = own_sums / num_rows[..., None]
    blocks = weight_products.view(h, d, h, d)
    mean_square = num_rows * torch.einsum("bhd,hdhe,bhe->bh", mean, blocks, mean)
    output_to_mean = torch.einsum("bijd,jdie,bie->bi", sums, blocks, mean)
    output_to_mean = output_to_mean + num_rows * (mean * (bias @ weight).view(h, d)).sum(-1)
    if direction is None:
        to_direction = inner.sum(-1) + to_bias
    else:
        head_directions = direction.double().masked_fill(~any_counts[..., None], 0) @ weight  # [b, q, h * d]
        to_direction = (head_directions * outputs).sum(1).view(b, h, d).sum(-1)
    counted = any_counts.any(1)
    to_direction = to_direction.masked_fill(~counted[:, None], torch.nan)
    return Products(inner, to_bias, bias_square, to_direction, mean_square, output_to_mean, counted)


def gradient_importance(contribution: Tensor) -> Tensor:
    """[b, h]: |dL/dxi_h| over its l2 norm across heads (Michel et al. 2019, section 4.1)."""
    return contribution.abs() / contribution.square().sum(-1, keepdim=True).sqrt()


def zero_ablation(products: Products) -> dict[str, Tensor]:
    """Change of y if a head's output is replaced by 0."""
    square = products.heads.diagonal(dim1=1, dim2=2)
    return _ablation("zero_ablation", products, -products.to_output, square)


def mean_ablation(products: Products) -> dict[str, Tensor]:
    """Change of y if a head's output is replaced by its mean over the item's rows."""
    square = products.heads.diagonal(dim1=1, dim2=2) - products.mean_square
    return _ablation("mean_ablation", products, products.output_to_mean - products.to_output, square)


def _ablation(name: str, products: Products, along: Tensor, square: Tensor) -> dict[str, Tensor]:
    """|Dy| / |y|, and the cosine between y and y + Dy, from <y, Dy> `along` and |Dy|^2 `square`."""
    output_square = products.output_square[:, None]
    new_square = (output_square + 2 * along + square).clamp(min=0)
    return {
        f"{name}.relative_change": (square.clamp(min=0) / output_square).sqrt(),
        f"{name}.cosine": ((output_square + along) / (output_square.sqrt() * new_square.sqrt())).clamp(-1, 1),
    }


def pruning_order(products: Products) -> dict[str, Tensor]:
    """The heads in the order of greedy removal, each time the one whose removal changes y least, and |Dy| / |y| after each.

    Ties go to the lower head. The first n heads are not always the best set of n heads to remove.
    """
    inner, total = products.heads.cpu().numpy(), products.output_square.cpu().numpy()
    items, num_heads = inner.shape[:2]
    order, errors = np.full((items, num_heads), -1), np.full((items, num_heads), np.nan)
    for item in np.flatnonzero(products.counted.cpu().numpy()):
        gone = np.zeros(num_heads, bool)
        lost = 0.0
        for step in range(num_heads):
            losses = lost + 2 * inner[item][:, gone].sum(1) + inner[item].diagonal()
            head = int(np.argmin(np.where(gone, np.inf, losses)))
            gone[head], lost, order[item, step] = True, losses[head], head
            if total[item] > 0:
                errors[item, step] = np.sqrt(max(lost, 0.0) / total[item])
    return {"pruning_order.heads": torch.from_numpy(order), "pruning_order.errors": torch.from_numpy(errors)}


def value_norms(value: Tensor, weight: Tensor | None, groups: int, real: Tensor) -> Tensor:
    """[b, h, k]: |v_j W_h^T| of each key and head, NaN for padding, from values [b, kv heads, k, d] and the output projection [out, h * d]
    (Kobayashi et al. 2020). Computed as v W_h^T W_h v^T, so [h, k, out] is never stored.

    `groups` query heads share a kv head; `real` [b|1, k] is true for keys that are not padding.
    """
    b, kv, k, d = value.shape
    exact = value.double()
    if weight is None:
        norms = exact.square().sum(-1).sqrt().repeat_interleave(groups, 1)
    else:
        of_heads = weight.double().view(len(weight), kv, groups, d)
        squares = torch.einsum("ogad,ogae->gade", of_heads, of_heads)  # W_h^T W_h, [kv, groups, d, d]
        norms = torch.stack([((exact @ squares[:, a]) * exact).sum(-1) for a in range(groups)], 2).flatten(1, 2).clamp(min=0).sqrt()
    return norms.view(b, kv * groups, k).masked_fill(~real[:, None], torch.nan)
