"""Metrics of rows of attention weights: one number per (batch, head, query), and each head's strongest links.

A row is a distribution over keys. With attention sinks or sigmoid its weights do not sum to 1, so metrics use `shares`, the weights divided
by their sum. In rows that do not count (fully masked or padding) shares are 0, and the metrics NaN. Weights that may be negative have no
shares: their cosine similarity, the one metric that they have, is of the weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows
from torch import Tensor

from attend.attention.call import WeightBlock
from attend.attention.torch_arithmetic import top_k

ROUNDING = 1e-6  # tolerance when a sum of weights is compared with `mass`


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """The names of the requested metrics, and their parameters. Tensors are None if no requested metric needs them."""

    metrics: tuple[str, ...]
    local_window: int = 2
    top_links: int = 5
    mass: float = 0.9
    queries: Tensor | None = None  # bool [b|1, q]: which queries count; all if None
    query_tokens: Tensor | None = None  # int64 [b|1, q]: equal tokens have equal numbers ...
    key_tokens: Tensor | None = None  # ... [b|1, k]
    direction: Tensor | None = None  # [b, q, output_dim]
    link_keys: Tensor | None = None  # bool [b|1, k]: the keys that strongest links may have; all if None
    signed: bool = False  # whether weights may be negative

    def includes(self, *names: str) -> bool:
        """Whether any of these metrics is requested."""
        return any(name in self.metrics for name in names)

    def to(self, device: torch.device) -> "MetricsOptions":
        """The options with their tensors on `device`."""
        names = ("queries", "query_tokens", "key_tokens", "direction", "link_keys")
        return replace(self, **{name: tensor.to(device) for name in names if (tensor := getattr(self, name)) is not None})


@dataclass(frozen=True, slots=True)
class MetricsBlock:
    """A block of query rows of all heads."""

    options: MetricsOptions
    rows: slice
    weights: Tensor  # [b, h, rows, k], from the layer
    shares: Tensor  # [b, h, rows, k]: weights over the row's sum, signed weights as they are; 0 in rows that do not count
    counts: Tensor  # bool [b, h, rows]
    visible: Tensor | None  # bool [b|1, h|1, rows|1, k|1]: the pairs that may attend; None: all
    positions: Tensor  # [b|1, rows]: key positions of the queries
    first_key: Tensor  # [b|1]: the first key that is not padding
    overflowed: Tensor  # bool [b, h, rows]: rows with NaN weights that would count otherwise

    @property
    def keys(self) -> Tensor:
        return torch.arange(self.shares.shape[-1], device=self.shares.device)

    def nan_where_uncounted(self, values: Tensor) -> Tensor:
        """The values [b, h, rows] in float64, NaN where a row does not count."""
        return values.double().masked_fill(~self.counts, torch.nan)


def make_metrics_block(
    block: WeightBlock, positions: Tensor, fully_masked: Tensor | None, first_key: Tensor, options: MetricsOptions
) -> MetricsBlock:
    """The block of a layer's weights; `positions` [b|1, q] and `fully_masked` [b, h, q] are of all queries."""
    rows, weights, visible = block
    total = weights.sum(-1)
    overflowed = total.isnan()
    counts = ~overflowed if options.signed else total > 0
    if fully_masked is not None:
        counts &= ~fully_masked[:, :, rows]
    if options.queries is not None:
        counts &= options.queries[:, None, rows]
        overflowed &= options.queries[:, None, rows]
    shares = weights if options.signed else weights / total.masked_fill(~counts, 1)[..., None]
    if not counts.all():
        shares = shares.masked_fill(~counts[..., None], 0)
    return MetricsBlock(options, rows, weights, shares, counts, visible, positions[:, rows], first_key, overflowed)


def entropy(block: MetricsBlock) -> Tensor:
    """-sum_j a_j ln a_j in nats, 0 ln 0 = 0 (Clark et al. 2019)."""
    terms: Tensor = torch.special.entr(block.shares)
    return terms.sum(-1)


def normalised_entropy(block: MetricsBlock) -> Tensor:
    """Entropy over ln n for n visible keys; NaN if n is 1."""
    return entropy(block).double() / torch.log(_visible_keys(block).double()).clamp(min=0)


def confidence(block: MetricsBlock) -> Tensor:
    """The largest weight of the row (Voita et al. 2019)."""
    return block.shares.amax(-1)


def keys_for_mass(block: MetricsBlock) -> Tensor:
    """The smallest number of keys whose shares sum to `mass`."""
    cumulative = block.shares.sort(-1, descending=True).values.cumsum(-1)
    return (cumulative < block.options.mass - ROUNDING).sum(-1) + 1


def first_key_mass(block: MetricsBlock) -> Tensor:
    """Share of the first key that is not padding, which many heads use as a default target."""
    return _mass(block, block.keys == block.first_key[:, None, None, None])


def self_share(block: MetricsBlock) -> Tensor:
    """Mass on the query's own position."""
    return _mass(block, _distance(block) == 0)


def local_share(block: MetricsBlock) -> Tensor:
    """Mass on other positions, at most `local_window` away."""
    distance = _distance(block)
    return _mass(block, (distance > 0) & (distance <= block.options.local_window))


def global_share(block: MetricsBlock) -> Tensor:
    """Mass on positions more than `local_window` away."""
    return _mass(block, _distance(block) > block.options.local_window)


def mean_distance(block: MetricsBlock) -> Tensor:
    """sum_j a_j |i - j| (Vig & Belinkov 2019)."""
    return (block.shares * _distance(block).to(block.shares.dtype)).sum(-1)


def previous_token_score(block: MetricsBlock) -> Tensor:
    """Mass on the position before the query's; NaN if the query may not attend to it."""
    return _mass_where_any(block, block.keys == block.positions[:, None, :, None] - 1)


def duplicate_token_score(block: MetricsBlock) -> Tensor:
    """Mass on earlier positions with the query's token; NaN if none is visible."""
    return _mass_where_any(block, _earlier_same_tokens(block))


def induction_score(block: MetricsBlock) -> Tensor:
    """Mass on the positions after earlier ones with the query's token (Olsson et al. 2022); NaN if none is visible."""
    return _mass_where_any(block, F.pad(_earlier_same_tokens(block), (1, 0))[..., :-1])


POSITION_METRICS = (self_share, local_share, global_share, mean_distance, previous_token_score, duplicate_token_score, induction_score)
ROW_METRICS: dict[str, Callable[[MetricsBlock], Tensor]] = {
    metric.__name__: metric for metric in (entropy, normalised_entropy, confidence, keys_for_mass, first_key_mass, *POSITION_METRICS)
}


def _mass(block: MetricsBlock, pattern: Tensor) -> Tensor:
    """Sum of each row's shares of the keys in a pattern, bool [b|1, 1, rows|1, k]."""
    return block.shares.masked_fill(~pattern, 0).sum(-1)


def _mass_where_any(block: MetricsBlock, pattern: Tensor) -> Tensor:
    """As `_mass`, but NaN if no key of the pattern is visible to the row."""
    if block.visible is not None:
        pattern = pattern & block.visible
    return _mass(block, pattern).masked_fill(~pattern.any(-1), torch.nan)


def _distance(block: MetricsBlock) -> Tensor:
    """Distance of query and key, [b|1, 1, rows, k]."""
    return (block.positions[:, None, :, None] - block.keys).abs()


def _earlier_same_tokens(block: MetricsBlock) -> Tensor:
    """bool [b|1, 1, rows, k]: keys before the query's position with the query's token."""
    assert block.options.query_tokens is not None and block.options.key_tokens is not None
    same = block.options.query_tokens[:, None, block.rows, None] == block.options.key_tokens[:, None, None, :]
    return same & (block.keys < block.positions[:, None, :, None])


def _visible_keys(block: MetricsBlock) -> Tensor:
    """[b|1, h|1, rows|1]: number of visible keys of each row."""
    num_keys = block.shares.shape[-1]
    if block.visible is None:
        return torch.full((1, 1, 1), num_keys, device=block.shares.device)
    return block.visible.expand(*block.visible.shape[:-1], num_keys).sum(-1)


class StrongestLinks:
    """The n largest weights of each (batch, head), largest first; ties go to the lower query, then to the lower key.

    A row that sees one key gives it all its weight, whatever the head does, so it has no links. Keeps only the n best
    links while blocks are read, so [q, k] is never stored.
    """

    def __init__(self, n: int, keys: Tensor | None = None) -> None:
        """`keys`, bool [b|1, k]: those that links may have."""
        self.n, self.keys = n, keys
        self._weights: Tensor | None = None  # [b, h, n at most]
        self._pairs: Tensor | None = None  # [b, h, n at most]: query * number of keys + key
        self._num_keys = 0

    def add(self, block: MetricsBlock) -> None:
        """Merge the block's links into the best so far."""
        self._num_keys = block.shares.shape[-1]
        has_choice = block.counts & (_visible_keys(block) > 1)
        weights = block.weights.masked_fill(~has_choice[..., None], 0)
        weights = (weights if self.keys is None else weights.masked_fill(~self.keys[:, None, None], 0)).flatten(2)
        best, pairs = top_k(weights, min(self.n, weights.shape[-1]))
        here = pairs + block.rows.start * self._num_keys
        if self._weights is not None and self._pairs is not None:
            best, here = torch.cat((self._weights, best), -1), torch.cat((self._pairs, here), -1)
            best, order = best.sort(dim=-1, descending=True, stable=True)
            best, here = best[..., : self.n], here.gather(-1, order)[..., : self.n]
        self._weights, self._pairs = best, here

    def tensors(self) -> dict[str, Tensor]:
        """`queries`, `keys` and `weights`, each [b, h, n]; -1 and NaN for missing links. A weight of 0 is not a link."""
        assert self._weights is not None and self._pairs is not None
        none, num_keys = self._weights <= 0, max(1, self._num_keys)
        return {
            "strongest_links.queries": (self._pairs // num_keys).masked_fill(none, -1),
            "strongest_links.keys": (self._pairs % num_keys).masked_fill(none, -1),
            "strongest_links.weights": self._weights.double().masked_fill(none, torch.nan),
        }
