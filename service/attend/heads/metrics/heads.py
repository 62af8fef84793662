"""Metrics of heads: how much they resemble each other and a single head of the full width, and what each contributes to the output.

Sums over query rows are accumulated block by block, so only [h, h] is stored. A pair of heads is compared on the rows that count for both.

Contributions, and the effect of removing heads, have a closed form, since

    y = sum_h y_h + b,   y_h = O_h W_h^T

is linear in a factor xi_h before each y_h. So dL/dxi_h = <dL/dy, y_h> exactly, and the change of y when heads are removed or replaced
follows from the products <y_i, y_j>. These are computed from O^T O and W^T W, so y_h is never stored. Sums are in float64 over the rows
that count for any head. Without such rows the metrics are NaN, and the heads of the pruning order are -1.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from attend.attention.call import Call
from attend.axes import CALL_TENSORS
from attend.heads.metrics.rows import MetricsBlock


class CosineSimilarity:
    """Accumulates cosine similarity and position disagreement of the heads' weights."""

    def __init__(self) -> None:
        self._dots = self._squares = self._rows = torch.zeros(())

    def add(self, block: MetricsBlock) -> None:
        """Add the block's rows."""
        counts = block.counts.double()
        flat = block.shares.flatten(2)
        self._dots = self._dots + (flat @ flat.transpose(1, 2)).double()
        self._squares = self._squares + block.shares.square().sum(-1).double() @ counts.transpose(1, 2)
        self._rows = self._rows + counts @ counts.transpose(1, 2)

    def tensors(self) -> dict[str, Tensor]:
        """`cosine_similarity` [b, h, h]: of the angle between two heads' weights, each flattened to one vector. `position_disagreement`
        [b]: -1/h^2 sum_ij |A_i * A_j| (Li et al. 2018), averaged over queries, so that different lengths are comparable."""
        return {
            "cosine_similarity": (self._dots / (self._squares * self._squares.transpose(1, 2)).sqrt()).clamp(-1, 1),
            "position_disagreement": -(self._dots / self._rows).mean((1, 2)),
        }


class JensenShannon:
    """The Jensen-Shannon divergence between heads, in nats and averaged over queries: from 0 to ln 2 (Clark et al. 2019, with a sum)."""

    def __init__(self) -> None:
        self._sum = self._rows = torch.zeros(())

    def add(self, block: MetricsBlock) -> None:
        """Add a block: per row, entropy of the mean minus mean of the entropies, for one head against all at a time."""
        shares, counts = block.shares, block.counts
        own = torch.special.entr(shares).sum(-1)
        columns = []
        for i in range(shares.shape[1]):
            mixed = torch.special.entr((shares + shares[:, i : i + 1]) / 2).sum(-1)
            divergence = (mixed - (own + own[:, i : i + 1]) / 2).clamp(min=0)
            columns.append((divergence * (counts & counts[:, i : i + 1])).double().sum(-1))
        self._sum = self._sum + torch.stack(columns, -1)
        self._rows = self._rows + counts.double() @ counts.double().transpose(1, 2)

    def tensors(self) -> dict[str, Tensor]:
        """The divergence of each pair of heads, [b, h, h]."""
        return {"jensen_shannon": self._sum / self._rows}


def deviation(block: MetricsBlock) -> Tensor:
    """[b, rows]: the standard deviation of a weight across heads, averaged over the keys visible to any head.

    NaN for rows that do not count for every head.
    """
    spread = block.shares.std(1, correction=0)  # [b, rows, k]
    visible = torch.ones(1, 1, spread.shape[-1], dtype=torch.bool, device=spread.device) if block.visible is None else block.visible.any(1)
    keys = visible.expand(*visible.shape[:-1], spread.shape[-1]).sum(-1)
    return (spread.masked_fill(~visible, 0).sum(-1).double() / keys).masked_fill(~block.counts.all(1), torch.nan)


def cosines(gram: Tensor) -> Tensor:
    """Cosines between vectors from their inner products [..., h, h]; NaN for zero vectors."""
    lengths = gram.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    return (gram / (lengths[..., :, None] * lengths[..., None, :])).clamp(-1, 1)


def disagreement(gram: Tensor) -> Tensor:
    """[b]: -1/h^2 sum_ij cos(x_i, x_j), including i = j (Li et al. 2018); -1 if all heads are equal."""
    return -cosines(gram).mean((-2, -1))


def head_products(x: Tensor, counts: Tensor) -> Tensor:
    """[b, h, h]: <X_i, X_j> of values or outputs of heads [b, h, n, d], over the rows that count, bool [b, h|1, n].

    Repeating a kv head for each of its query heads would not change any mean over pairs.
    """
    flat = x.double().masked_fill(~counts[..., None], 0).flatten(2)
    return flat @ flat.transpose(1, 2)


def as_single_head(call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Call, Tensor, Tensor, Tensor]:
    """The call and its projections [b, heads, n, d] for a layer of one head, [b, 1, n, h * d].

    A one-head layer of the same seed has the same matrices, since a seed draws whole matrices. Its scale is 1/sqrt(h * head_dim), so its
    scores are the sum of the heads' scores over sqrt(h). Grouped keys and values are repeated for each of their query heads.
    """
    h, groups = query.shape[1], query.shape[1] // key.shape[1]
    wide = (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
    query, key, value = (x.transpose(1, 2).flatten(2)[:, None] for x in wide)
    given = {name: tensor for name, tensor in call.given.items() if "h" not in CALL_TENSORS[name]}  # it has none of many heads
    return replace(call, given=given).with_options(scale=call.options.scale / h**0.5), query, key, value


class SingleHead:
    """Accumulates the metrics of the single head, and its similarity to each head of the layer."""

    def __init__(self) -> None:
        self._sums = torch.zeros(())  # [b, 3]: entropy, confidence, rows
        self._products = torch.zeros(())  # [3, b, h]: of the single head's weights and each head's, and both squares
        self._outputs: list[Tensor] = []  # [b, rows, h * d]

    def add(self, block: MetricsBlock, of_layer: MetricsBlock, value: Tensor) -> None:
        """Add a block of the single head, and the same rows of the layer; `value` [b, 1, k, h * d] is the single head's."""
        counts = block.counts[:, 0]
        entropy = torch.special.entr(block.shares[:, 0]).sum(-1)
        rows = torch.stack((entropy.double(), block.shares[:, 0].amax(-1).double(), counts.double()))
        self._sums = self._sums + (rows * counts).sum(-1).T
        both = (block.counts & of_layer.counts)[..., None]
        single, heads = block.shares * both, of_layer.shares * both
        products = torch.stack([(x * y).flatten(2).sum(-1).double() for x, y in ((single, heads), (single, single), (heads, heads))])
        self._products = self._products + products
        self._outputs.append(block.weights[:, 0] @ value[:, 0].to(block.weights.dtype))

    @property
    def outputs(self) -> Tensor:
        """The outputs of the single head before the output projection, [b, q, h * d]."""
        return torch.cat(self._outputs, 1)

    def tensors(self, output: Tensor, single_output: Tensor, counts: Tensor) -> dict[str, Tensor]:
        """The metrics, from the outputs [b, q, out] of the layer and of the single head; `counts` [b, q]: the rows that count."""
        entropy, confidence = (self._sums[:, :2] / self._sums[:, 2:]).T
        products, single_squares, head_squares = self._products
        output, single_output = (x.double().masked_fill(~counts[..., None], 0).flatten(1) for x in (output, single_output))
        norm = output.square().sum(-1).sqrt()
        return {
            "single_head.entropy": entropy,
            "single_head.confidence": confidence,
            "single_head.similarity": (products / (single_squares * head_squares).sqrt()).clamp(max=1),
            "single_head.relative_change": (single_output - output).square().sum(-1).sqrt() / norm,
            "single_head.cosine": ((output * single_output).sum(-1) / (norm * single_output.square().sum(-1).sqrt())).clamp(-1, 1),
        }


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
