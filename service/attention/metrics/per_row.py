"""Metrics of single rows: a block of attention weights -> one number per (batch, head, query).

A row is a distribution over keys. With attention sinks its weights sum to less than 1; what is read here is their share of that sum, so
that every formula has a distribution before it. Rows that do not count (no key, or padding) are 0 throughout, and their numbers NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows
from torch import Tensor

from service.attention.metrics.query import MetricsQuery

ROUNDING = 1e-6  # by which a sum of weights may fall short of the mass that it is meant to hold


@dataclass(frozen=True, slots=True)
class Block:
    """Some query rows of all heads."""

    rows: slice
    weights: Tensor  # [b, h, rows, k] as the layer makes them
    shares: Tensor  # [b, h, rows, k] of each row's sum; 0 in rows that do not count
    counts: Tensor  # bool [b, h, rows]
    seen: Tensor | None  # bool [b|1, h|1, rows|1, k|1]: who may attend to whom; None: everyone
    positions: Tensor  # [b|1, rows]: where the queries stand among the keys
    first_key: Tensor  # [b|1]: the first key that is not padding
    overflowed: Tensor  # bool [b, h, rows]: rows that would count, but whose scores are no numbers

    @property
    def keys(self) -> Tensor:
        return torch.arange(self.shares.shape[-1], device=self.shares.device)

    def of_counted(self, values: Tensor) -> Tensor:
        """The values [b, h, rows] in float64, NaN where a row does not count."""
        return values.double().masked_fill(~self.counts, torch.nan)


def read_block(
    rows: slice,
    weights: Tensor,
    seen: Tensor | None,
    positions: Tensor,
    fully_masked: Tensor | None,
    first_key: Tensor,
    metrics_query: MetricsQuery,
) -> Block:
    """The block of these weights [b, h, rows, k] and visible keys; `positions` [b|1, q] and `fully_masked` [b, h, q] are of all queries,
    `first_key` [b|1] is the first key that is not padding.
    """
    total = weights.sum(-1)
    counts, overflowed = total > 0, total.isnan()
    if fully_masked is not None:
        counts &= ~fully_masked[:, :, rows]
    if metrics_query.queries is not None:
        counts &= metrics_query.queries[:, None, rows]
        overflowed &= metrics_query.queries[:, None, rows]
    shares = weights / total.masked_fill(~counts, 1)[..., None]
    if not counts.all():
        shares = shares.masked_fill(~counts[..., None], 0)
    return Block(rows, weights, shares, counts, seen, positions[:, rows], first_key, overflowed)


def entropy(block: Block, metrics_query: MetricsQuery) -> Tensor:
    """-sum_j a_j ln a_j in nats, 0 ln 0 = 0 (Clark et al. 2019)."""
    terms: Tensor = torch.special.entr(block.shares)
    return terms.sum(-1)


def normalised_entropy(block: Block, metrics_query: MetricsQuery) -> Tensor:
    """Entropy over ln n, n the keys that the row may see; not defined where that is one."""
    return entropy(block, metrics_query).double() / torch.log(_keys_seen(block).double()).clamp(min=0)


def confidence(block: Block, metrics_query: MetricsQuery) -> Tensor:
    """The largest weight of the row (Voita et al. 2019)."""
    return block.shares.amax(-1)


def keys_for_mass(block: Block, metrics_query: MetricsQuery) -> Tensor:
    """The least number of keys that hold the share `mass` of the row."""
    held = block.shares.sort(-1, descending=True).values.cumsum(-1)
    return (held < metrics_query.mass - ROUNDING).sum(-1) + 1


def first_key_mass(block: Block, metrics_query: MetricsQuery) -> Tensor:
    """What goes to the first key, where many heads rest when they have nothing to do."""
    return _mass(block, block.keys == block.first_key[:, None, None, None])


def self_share(block: Block, metrics_query: MetricsQuery) -> Tensor:
    """Mass on the query's own position."""
    return _mass(block, _distance(block) == 0)


def local_share(block: Block, metrics_query: MetricsQuery) -> Tensor:
    """Mass on other positions, at most `local_window` away."""
    distance = _distance(block)
    return _mass(block, (distance > 0) & (distance <= metrics_query.local_window))


def global_share(block: Block, metrics_query: MetricsQuery) -> Tensor:
    """Mass on positions further away than that."""
    return _mass(block, _distance(block) > metrics_query.local_window)


def mean_distance(block: Block, metrics_query: MetricsQuery) -> Tensor:
    """sum_j a_j |i - j| (Vig & Belinkov 2019)."""
    return (block.shares * _distance(block).to(block.shares.dtype)).sum(-1)


def previous_token_score(block: Block, metrics_query: MetricsQuery) -> Tensor:
    """Mass on the position before the query's; not defined where the query may not look there."""
    return _mass_where_any(block, block.keys == block.positions[:, None, :, None] - 1)


def duplicate_token_score(block: Block, metrics_query: MetricsQuery) -> Tensor:
    """Mass on earlier positions that hold the query's own word; not defined where there are none that it may see."""
    return _mass_where_any(block, _earlier_same_words(block, metrics_query))


def induction_score(block: Block, metrics_query: MetricsQuery) -> Tensor:
    """Mass on the positions that follow earlier ones with the query's own word (Olsson et al. 2022); not defined where there are none."""
    return _mass_where_any(block, F.pad(_earlier_same_words(block, metrics_query), (1, 0))[..., :-1])


ROW_METRICS: dict[str, Callable[[Block, MetricsQuery], Tensor]] = {
    "entropy": entropy,
    "normalised_entropy": normalised_entropy,
    "confidence": confidence,
    "keys_for_mass": keys_for_mass,
    "first_key_mass": first_key_mass,
    "self_share": self_share,
    "local_share": local_share,
    "global_share": global_share,
    "mean_distance": mean_distance,
    "previous_token_score": previous_token_score,
    "duplicate_token_score": duplicate_token_score,
    "induction_score": induction_score,
}


def _mass(block: Block, pattern: Tensor) -> Tensor:
    """What each row gives to the keys of a pattern, bool [b|1, 1, rows|1, k]."""
    return block.shares.masked_fill(~pattern, 0).sum(-1)


def _mass_where_any(block: Block, pattern: Tensor) -> Tensor:
    """The same, NaN where the row may see no key of the pattern."""
    if block.seen is not None:
        pattern = pattern & block.seen
    return _mass(block, pattern).masked_fill(~pattern.any(-1), torch.nan)


def _distance(block: Block) -> Tensor:
    """[b|1, 1, rows, k] between query and key."""
    return (block.positions[:, None, :, None] - block.keys).abs()


def _earlier_same_words(block: Block, metrics_query: MetricsQuery) -> Tensor:
    """bool [b|1, 1, rows, k]: keys before the query's position that hold the query's word."""
    assert metrics_query.query_words is not None and metrics_query.key_words is not None
    same = metrics_query.query_words[:, None, block.rows, None] == metrics_query.key_words[:, None, None, :]
    return same & (block.keys < block.positions[:, None, :, None])


def _keys_seen(block: Block) -> Tensor:
    """[b|1, h|1, rows|1]: how many keys each row may see; 1 is given as one whose logarithm divides to NaN."""
    num_keys = block.shares.shape[-1]
    if block.seen is None:
        return torch.full((1, 1, 1), num_keys, device=block.shares.device)
    return block.seen.expand(*block.seen.shape[:-1], num_keys).sum(-1)
