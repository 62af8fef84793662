"""The kinds of figure: `operation_for` returns the operation that a kind needs, `compose` turns its result into a picture.

Weights are reduced block by block, so those of a long sequence are never stored together.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from attend.attention.call import Call, Result, WeightBlock
from attend.attention.layer import MultiHeadAttention
from attend.attention.operations import Operation
from attend.errors import InvalidRequest
from attend.heads.figures.geometry import WIDEST, resolution
from attend.heads.figures.spec import Axis, FigureSpec, Panel, Picture, Pool, Scale
from attend.heads.metrics.compute import OVERFLOWED, MetricsOperation
from attend.heads.metrics.rows import MetricsOptions
from attend.tensors import Array

Reduction = Callable[[Iterable[WeightBlock]], dict[str, Tensor]]  # blocks of weights -> tensors by name
MAX_CELLS = 1 << 18  # in all panels of a picture
SMALLEST_END = 1e-300  # end of a scale: differences of smaller or larger ends underflow or overflow
DARKEST_SHARE = 1e-5  # as a share of the largest value: smaller values have the first colour of a logarithmic scale
OUTPUTS = {"concatenated": "heads' outputs, side by side", "output": "after the output projection"}
TEXTS = {  # of each kind: its title, the name beside the colour bar, and that in the note
    "heads": ("Attention weights by head", "attention weight", "attention weight"),
    "head": ("Attention weights, head {first}", "attention weight", "attention weight"),
    "mean": ("Attention weights, mean of {count} heads", "mean weight", "mean weight across heads"),
    "std": (
        "Attention weights, standard deviation across {count} heads",
        "standard deviation",
        "standard deviation of the weight across heads",
    ),
    "similarity": ("How similarly the heads attend", "cosine similarity", "cosine similarity"),
    "concatenation": ("Outputs of the heads", "value", "value, 0 in the middle"),
}


@dataclass(frozen=True, slots=True)
class WeightReduction(Operation):
    """The operation that reduces a call's weights block by block, instead of computing outputs. It reads the weights of `heads`, at the
    positions `queries` and `keys` (None: all)."""

    reduction: Reduction
    heads: tuple[int, ...] | None = None
    queries: tuple[int, ...] | None = None
    keys: tuple[int, ...] | None = None

    @torch.inference_mode()
    def run(self, layer: MultiHeadAttention, call: Call) -> Result:
        """The reduction's tensors."""
        fully_masked = layer.fully_masked(call)
        blocks = layer.weight_blocks(call.with_options(heads=self.heads, queries=self.queries), fully_masked=fully_masked)
        return Result(self.reduction(map(self._selected, blocks)), fully_masked)

    def _selected(self, block: WeightBlock) -> WeightBlock:
        """The block with the keys that are read."""
        if self.keys is None:
            return block
        keys, visible = list(self.keys), block.visible
        if visible is not None:
            visible = visible.expand(*visible.shape[:-1], block.weights.shape[-1])[..., keys]
        return WeightBlock(block.rows, block.weights[..., keys], visible)


def mean_across(weights: Tensor) -> Tensor:
    """The mean over heads: [heads, rows, k] -> [1, rows, k]."""
    return weights.mean(0, keepdim=True)


def std_across(weights: Tensor) -> Tensor:
    """The standard deviation over heads, sqrt(mean_h (w_h - mean_h w)²) (divisor h, not h - 1): [heads, rows, k] -> [1, rows, k]."""
    return (weights - mean_across(weights)).square().mean(0, keepdim=True).sqrt()  # torch.std takes four times as long


@dataclass(frozen=True, slots=True)
class Pooling:
    """Pools weights to cells of `query_step` queries by `key_step` keys: the mean or the maximum over the pairs that may attend.

    Returns `pooled`, float64 [heads or 1, cells, cells], NaN in cells where no pair may attend, infinity where a weight is not finite.
    """

    item: int
    shape: tuple[int, int]  # queries, keys
    query_step: int
    key_step: int
    pool: Pool = "mean"
    across: Callable[[Tensor], Tensor] | None = None  # reduces the heads to one before pooling

    def __call__(self, blocks: Iterable[WeightBlock]) -> dict[str, Tensor]:
        pooled = counts = torch.empty(0)
        cells = -(-self.shape[0] // self.query_step), -(-self.shape[1] // self.key_step)
        for rows, weights, visible in blocks:
            values, attended = _of_item(weights, visible, self.item)
            if self.across is not None:
                values, attended = self.across(values), attended.any(0, keepdim=True)
            if not pooled.numel():
                pooled = torch.zeros(values.shape[0], *cells, dtype=torch.float64, device=values.device)
                counts = torch.zeros(attended.shape[0], *cells, dtype=torch.float64, device=values.device)
            values, number = self._pool_keys(values.double(), self.pool), self._pool_keys(attended.double(), "mean")
            for cell in range(rows.start // self.query_step, (rows.stop - 1) // self.query_step + 1):
                part = slice(max(cell * self.query_step - rows.start, 0), (cell + 1) * self.query_step - rows.start)
                counts[:, cell] += number[:, part].sum(1)
                if self.pool == "max":
                    pooled[:, cell] = torch.maximum(pooled[:, cell], values[:, part].amax(1))
                else:
                    pooled[:, cell] += values[:, part].sum(1)
        pooled = pooled / counts if self.pool == "mean" else pooled
        return {"pooled": _nan_to_infinity(pooled).masked_fill(counts == 0, torch.nan)}

    def _pool_keys(self, values: Tensor, pool: Pool) -> Tensor:
        """[..., k] -> [..., cells]: the sum (for the mean) or the maximum over the keys of each cell."""
        if self.key_step == 1:
            return values
        padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % self.key_step))
        parts = padded.view(*padded.shape[:-1], -1, self.key_step)
        return parts.amax(-1) if pool == "max" else parts.sum(-1)


def pool_array(values: Tensor, row_step: int, column_step: int, pool: Pool) -> Tensor:
    """[rows, columns] -> cells: the mean or the maximum of each; values may be negative."""
    pooling = Pooling(0, (values.shape[0], values.shape[1]), row_step, column_step, pool)
    shift = values.min() if pool == "max" else values.new_zeros(())  # maxima start at 0
    return pooling([WeightBlock(slice(0, values.shape[0]), (values - shift)[None, None], None)])["pooled"][0] + shift


def _nan_to_infinity(numbers: Tensor) -> Tensor:
    """Replace NaN by infinity, since NaN marks cells without pairs."""
    return numbers.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _of_item(weights: Tensor, visible: Tensor | None, item: int) -> tuple[Tensor, Tensor]:
    """One item's weights [h, rows, k], 0 for pairs that may not attend, even in filled rows; and bool [h|1, rows, k], which pairs may."""
    values = weights[item]
    if visible is None:
        return values, torch.ones(1, 1, 1, dtype=torch.bool, device=values.device).expand(1, *values.shape[1:])
    visible = visible[item if visible.shape[0] > 1 else 0]
    visible = visible.expand(visible.shape[0], *values.shape[1:])
    return values.masked_fill(~visible, 0), visible


def operation_for(spec: FigureSpec, counted: Tensor | None = None) -> WeightReduction | MetricsOperation | None:
    """The reduction of the weights for a figure; None for `concatenation`, which shows outputs of the layer.

    `counted`, bool [b|1, q]: the queries that count in `similarity`, which shows the metric `cosine_similarity`; all if None.
    """
    if spec.kind == "concatenation":
        return None
    if spec.kind == "similarity":
        return MetricsOperation(MetricsOptions(("cosine_similarity",), queries=counted, signed=spec.signed))
    across = {"mean": mean_across, "std": std_across}.get(spec.kind)
    reduction = Pooling(spec.item, (spec.queries, spec.keys), *_steps(spec), spec.pool, across)
    return WeightReduction(reduction, spec.heads, spec.query_positions, spec.key_positions)


def compose(spec: FigureSpec, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> Picture:
    """The picture. Raises InvalidRequest for a value that is not finite."""
    steps = (1, 1)
    if spec.kind == "concatenation":
        panels, steps = _output_panels(spec, tensors)
    elif spec.kind == "similarity":
        heads = Axis("head", len(spec.heads), labels=tuple(map(str, spec.heads)))
        cosines = tensors["cosine_similarity"][spec.item][list(spec.heads)][:, list(spec.heads)]
        panels = [Panel("", heads, heads, cosines.masked_fill(tensors[OVERFLOWED], torch.inf).numpy())]
    else:
        steps = _steps(spec)
        panels = _weight_panels(spec, steps, tensors["pooled"].numpy())
    for panel in panels:
        if np.isinf(panel.values).any():
            raise InvalidRequest.where("", f"finite numbers to draw for {panel.title or spec.kind}", "infinity")
    default_title, name, long_name = TEXTS[spec.kind]
    source = f", {about['Source']}" if "Source" in about else ""
    title = default_title.format(first=spec.heads[0], count=len(spec.heads)) + source if spec.title is None else spec.title
    if spec.scale_per_head and spec.kind == "heads":
        panels = [_with_own_scale(panel) for panel in panels]
        name, long_name = "share of the head's largest weight", "attention weight, as a share of the head's largest"
    scale = _scale(spec, name, panels)
    notes = [f"Colour: {long_name}, {scale.low:.3g} to {scale.high:.3g}.", *_pooling_note(spec, steps)]
    notes += [f"Left out: {', '.join(spec.omitted)}."] * bool(spec.omitted)
    return Picture(title, tuple(panels), scale, tuple(notes), {"Title": title, **about})


def _steps(spec: FigureSpec) -> tuple[int, int]:
    """Queries and keys for each cell."""
    side = resolution(len(spec.heads) if spec.kind == "heads" else 1, spec, MAX_CELLS)
    return -(-spec.queries // side), -(-spec.keys // side)


def _weight_panels(spec: FigureSpec, steps: tuple[int, int], pooled: Array) -> list[Panel]:
    rows = Axis("query", spec.queries, steps[0], spec.query_labels)
    columns = Axis("key", spec.keys, steps[1], spec.key_labels)
    panels = []
    for i, values in enumerate(pooled):
        empty = tuple(np.flatnonzero(np.isnan(values).all(1)).tolist())
        panels.append(Panel(f"head {spec.heads[i]}" if spec.kind == "heads" else "", rows, columns, values, empty))
    return panels


def _with_own_scale(panel: Panel) -> Panel:
    """The panel with colours up to its largest value, which its title says."""
    largest = float(np.nanmax(np.abs(panel.values), initial=0.0))
    return (
        replace(panel, title=f"{panel.title}, up to {largest:.2g}", unit=min(max(largest, SMALLEST_END), 1 / SMALLEST_END))
        if largest
        else panel
    )


def _output_panels(spec: FigureSpec, tensors: Mapping[str, Tensor]) -> tuple[list[Panel], tuple[int, int]]:
    """The heads' outputs side by side, and their projection where the layer has one."""
    names = [name for name in OUTPUTS if name in tensors]
    widest = max(tensors[name].shape[-1] for name in names)
    columns_each = -(-widest // resolution(1, spec, MAX_CELLS**2, WIDEST))
    most = min(resolution(1, spec, MAX_CELLS), MAX_CELLS // 2 // -(-widest // columns_each))
    steps = -(-spec.queries // most), columns_each
    panels = []
    for name in names:
        values = tensors[name][spec.item].double()
        values = values if spec.query_positions is None else values[list(spec.query_positions)]
        if not torch.isfinite(values).all():
            raise InvalidRequest.where("", f"finite numbers in {name}", "NaN or infinity")
        rows = Axis("query", spec.queries, steps[0], spec.query_labels)
        columns = Axis("dimension", values.shape[1], steps[1])
        if name == "concatenated":
            columns = Axis("head, its dimensions side by side", values.shape[1], steps[1], groups=tuple(map(str, spec.heads)))
        panels.append(Panel(OUTPUTS[name], rows, columns, pool_array(values, *steps, spec.pool).numpy()))
    return panels, steps


def _scale(spec: FigureSpec, name: str, panels: Sequence[Panel]) -> Scale:
    largest = max(float(np.nanmax(np.abs(panel.shares), initial=0.0)) for panel in panels)
    if spec.kind == "similarity":
        largest = 1.0  # cosines
    high = min(max(spec.maximum or largest or 1.0, SMALLEST_END), 1 / SMALLEST_END)
    if spec.kind == "concatenation" or (spec.signed and spec.kind != "std"):
        return Scale(name, -high, high, diverging=True)
    if spec.logarithmic:
        smallest = min(float(np.min(panel.shares, where=panel.shares > 0, initial=high)) for panel in panels)
        return Scale(name, min(max(smallest, high * DARKEST_SHARE), high / 10), high, logarithmic=True)
    return Scale(name, 0.0, high)


def _pooling_note(spec: FigureSpec, steps: tuple[int, int]) -> list[str]:
    if max(steps) == 1:
        return []
    how = {"mean": "mean", "max": "maximum"}[spec.pool]
    if spec.kind == "concatenation":
        return [f"Pooled: each cell is the {how} of up to {steps[0]} queries x {steps[1]} dimensions."]
    pairs = f"{spec.queries} queries x {spec.keys} keys"
    return [f"Pooled: {pairs}; each cell is the {how} over the pairs that may attend among up to {steps[0]} x {steps[1]}."]
