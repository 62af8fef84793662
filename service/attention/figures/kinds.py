"""The kinds of figure: `operation_for` returns the reduction of weights that a kind needs, `compose` turns its result into a picture."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from service.attention.figures.layout import WIDEST, resolution
from service.attention.figures.reductions import Pooling, Reduction, Similarity, WeightReduction, mean_across, pool_array, std_across
from service.attention.figures.spec import Axis, FigureSpec, Panel, Picture, Scale
from service.errors import InvalidRequest
from service.tensors import Array

MAX_CELLS = 1 << 18  # in all panels of a picture
SMALLEST_END = 1e-300  # end of a scale: differences of smaller or larger ends underflow or overflow
DARKEST_SHARE = 1e-5  # as a share of the largest value: smaller values have the first colour of a logarithmic scale
ACROSS = {"mean": mean_across, "std": std_across}
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


def operation_for(spec: FigureSpec) -> WeightReduction | None:
    """The reduction of the weights for a figure; None for `concatenation`, which shows outputs of the layer."""
    if spec.kind == "concatenation":
        return None
    reduction: Reduction = Similarity(spec.item)
    if spec.kind != "similarity":
        reduction = Pooling(spec.item, (spec.queries, spec.keys), *_steps(spec), spec.pool, ACROSS.get(spec.kind))
    return WeightReduction(reduction, spec.query_positions, spec.key_positions)


def compose(spec: FigureSpec, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> Picture:
    """The picture. Raises InvalidRequest for a value that is not finite."""
    steps = (1, 1)
    if spec.kind == "concatenation":
        panels, steps = _output_panels(spec, tensors)
    elif spec.kind == "similarity":
        heads = Axis("head", len(spec.heads), labels=tuple(map(str, spec.heads)))
        panels = [Panel("", heads, heads, tensors["similarity"].numpy())]
    else:
        steps = _steps(spec)
        panels = _weight_panels(spec, steps, tensors["pooled"].numpy())
    for panel in panels:
        if np.isinf(panel.values).any():
            raise InvalidRequest.where("", f"finite numbers to draw for {panel.title or spec.kind}", "infinity")
    default_title, name, long_name = TEXTS[spec.kind]
    whose = f", {about['Source']}" if "Source" in about else ""
    title = default_title.format(first=spec.heads[0], count=len(spec.heads)) + whose if spec.title is None else spec.title
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
    largest = max(float(np.nanmax(np.abs(panel.values), initial=0.0)) for panel in panels)
    if spec.kind == "similarity":
        largest = 1.0  # cosines
    high = min(max(spec.maximum or largest or 1.0, SMALLEST_END), 1 / SMALLEST_END)
    if spec.kind == "concatenation" or (spec.signed and spec.kind != "std"):
        return Scale(name, -high, high, diverging=True)
    if spec.logarithmic:
        smallest = min(float(np.min(panel.values, where=panel.values > 0, initial=high)) for panel in panels)
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
