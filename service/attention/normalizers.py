"""Attention weights that are not one softmax of the scores: scalable softmax, sigmoid, and the difference of two softmaxes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from service.attention.call import Call
from service.attention.eager import Eager, RowBlock
from service.attention.masks import Masks, real_keys
from service.attention.relative_scores import CallTerms
from service.spec import LAMBDAS, LayerSpec


def make_eager(spec: LayerSpec, weights: Mapping[str, Tensor], device: torch.device) -> Eager:
    """The eager attention of a layer, of the class that computes its kind of weights."""
    cls = DifferentialAttention if spec.differential else NORMALIZERS[spec.normalizer]
    return cls(spec, weights, device)


class ScalableSoftmax(Eager):
    """Softmax of the scores times ln n, for a row that may attend to n keys (Nakanishi 2025, equation 3, with s in the scale)."""

    def _scores(self, call: Call, query: Tensor, key: Tensor, rows: slice, visible: Tensor | None, terms: CallTerms | None) -> Tensor:
        scores = super()._scores(call, query, key, rows, None, terms) * self._log_count(call.masks, visible)
        return scores if visible is None else scores.masked_fill_(~visible, -torch.inf)

    def alibi_shift(self, masks: Masks, rows: slice, heads: Sequence[int] | None) -> Tensor | None:
        shift = super().alibi_shift(masks, rows, heads)
        return None if shift is None else shift * self._log_count(masks, masks.visible(rows))[..., 0]

    def _log_count(self, masks: Masks, visible: Tensor | None) -> Tensor:
        """ln n of each row, [b|1, h|1, rows|1, 1]; 0 for fully masked rows."""
        if visible is None:
            count = torch.full((1, 1, 1, 1), masks.num_keys, device=masks.positions.device)
        else:
            count = visible.expand(*visible.shape[:-1], masks.num_keys).sum(-1, keepdim=True)
        return count.clamp(min=1).to(self.dtype).log()


class Sigmoid(Eager):
    """The sigmoid of each score less ln n, for n keys in the query's sequence (Ramapuram et al. 2024, equation 3)."""

    def _scores(self, call: Call, query: Tensor, key: Tensor, rows: slice, visible: Tensor | None, terms: CallTerms | None) -> Tensor:
        scores = super()._scores(call, query, key, rows, None, terms)
        if (shift := super().alibi_shift(call.masks, rows, call.heads)) is not None:
            scores = scores + shift[..., None].to(self.dtype)
        scores = scores - self._log_count(call.masks, rows, query.shape[0])
        return scores if visible is None else scores.masked_fill_(~visible, -torch.inf)

    def _normalise(self, block: RowBlock, sinks: Tensor | None) -> Tensor:
        """The sigmoid of the scores, [b, h, rows, k]; 0 for -inf. There are no sinks."""
        return torch.sigmoid(block.scores)

    def alibi_shift(self, masks: Masks, rows: slice, heads: Sequence[int] | None) -> None:
        """None: the shift is in the scores, since a sigmoid depends on it."""

    def _log_count(self, masks: Masks, rows: slice, batch: int) -> Tensor:
        """ln of the number of keys that are neither padding nor of other segments, [b, 1, rows|1, 1]; 0 without such keys."""
        keys = real_keys(masks, batch)[:, None]
        if (queries := masks.query_segments) is not None and masks.key_segments is not None:
            queries = queries[:, rows] if queries.shape[1] > 1 else queries
            keys = keys & (queries[:, :, None] == masks.key_segments[:, None])
        return keys.sum(-1).clamp(min=1).to(self.dtype).log()[:, None, :, None]


class DifferentialAttention(Eager):
    """Weights softmax(q1 k1) - lambda softmax(q2 k2) of the halves of queries and keys, and a norm of each head's output (Ye et al. 2024).

    Blocks have the scores of the first softmax; requests cannot ask for scores.
    """

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Tensor], device: torch.device) -> None:
        super().__init__(spec, weights, device)
        assert spec.differential is not None
        q1, k1, q2, k2 = (weights[name].double() for name in LAMBDAS)
        self._lambda = float(torch.exp(q1 @ k1) - torch.exp(q2 @ k2)) + spec.differential.lambda_init
        self._eps, self._factor = spec.differential.eps, torch.tensor(1 - spec.differential.lambda_init, dtype=self.dtype, device=device)
        if spec.differential.norm_weights:
            self._factor = self._factor * weights["head_norm.weight"].to(self.dtype)

    def compute(
        self, call: Call, query: Tensor, key: Tensor, value: Tensor, fully_masked: Tensor | None, wanted: Iterable[str]
    ) -> dict[str, Tensor]:
        tensors = super().compute(call, query, key, value, fully_masked, wanted)
        if (outputs := tensors.get("head_outputs")) is not None:
            exact = outputs.to(self.dtype)
            exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self._eps)
            tensors["head_outputs"] = (exact * self._factor).to(self.layer_dtype)
        return tensors

    def row_blocks(
        self, call: Call, query: Tensor, key: Tensor, fully_masked: Tensor | None, blocks: Iterable[slice] | None = None
    ) -> Iterator[RowBlock]:
        blocks = None if blocks is None else tuple(blocks)
        (q1, q2), (k1, k2) = query.chunk(2, -1), key.chunk(2, -1)
        first_blocks = super().row_blocks(call, q1, k1, fully_masked, blocks)
        second_blocks = super().row_blocks(call, q2, k2, fully_masked, blocks)
        for first, second in zip(first_blocks, second_blocks, strict=True):
            yield first._replace(second=second)

    def attention_weights(self, call: Call, block: RowBlock) -> Tensor:
        assert block.second is not None
        return super().attention_weights(call, block) - self._lambda * super().attention_weights(call, block.second)


NORMALIZERS: dict[str, type[Eager]] = {"softmax": Eager, "scalable_softmax": ScalableSoftmax, "sigmoid": Sigmoid}
