"""Comparison of heads: how much they resemble each other, and a single head of the full width.

Sums over query rows are accumulated block by block, so only [h, h] is stored. A pair of heads is compared on the rows that count for both.
"""

from dataclasses import replace

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
    # it has none of many heads
    optional_inputs = {name: tensor for name, tensor in call.optional_inputs.items() if "h" not in CALL_TENSORS[name]}
    return replace(call, optional_inputs=optional_inputs).with_options(scale=call.options.scale / h**0.5), query, key, value


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
