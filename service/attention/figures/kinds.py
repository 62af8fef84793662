"""The kinds of picture: which numbers each one needs of a layer, and how they become panels.

A kind is asked twice: `needs` before anything is computed, `compose` with what came of it. Pure: arrays and words in, a picture out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from service.attention.figures.layout import WIDEST, resolution
from service.attention.figures.picture import Axis, Panel, Picture, Pool, Scale, Style
from service.attention.figures.pooling import Across, Raster, Similarity, deviation_across, mean_across, pool_array
from service.errors import InvalidRequest
from service.tensors import Array

Kind = Literal["heads", "head", "mean", "std", "similarity", "concatenation"]
CELLS = 1 << 18  # of all panels of a picture
SMALLEST = 1e-300  # end of a scale: further out, differences of two ends would overflow or vanish
DARKEST = 1e-5  # of the largest value: what is less has the first colour of a logarithmic scale
ACROSS: dict[str, Across] = {"mean": mean_across, "std": deviation_across}
SCALES = {"std": "standard deviation of the weight across heads", "mean": "mean weight across heads", "similarity": "cosine similarity"}


@dataclass(frozen=True, slots=True)
class Subject:
    """What a picture is of: one item of a call with `queries` x `keys` pairs and some heads of a layer."""

    kind: Kind
    item: int
    queries: int
    keys: int
    heads: tuple[int, ...]
    query_words: tuple[str, ...] = ()
    key_words: tuple[str, ...] = ()
    pool: Pool | None = None
    title: str | None = None
    maximum: float | None = None
    logarithmic: bool = False

    @property
    def pooled(self) -> Pool:
        return self.pool or "mean"


def needs(subject: Subject, style: Style) -> Raster | Similarity | None:
    """What to take from the weights as they are made; None where the picture is of outputs."""
    if subject.kind == "concatenation":
        return None
    if subject.kind == "similarity":
        return Similarity(subject.item)
    steps = _steps(subject, style)
    return Raster(subject.item, (subject.queries, subject.keys), *steps, subject.pooled, ACROSS.get(subject.kind))


def compose(subject: Subject, style: Style, tensors: Mapping[str, Tensor], about: dict[str, str]) -> Picture:
    """The picture. Raises InvalidRequest where a number is not finite."""
    if subject.kind == "concatenation":
        panels, steps = _outputs(subject, style, tensors)
    elif subject.kind == "similarity":
        heads = Axis("head", len(subject.heads), words=tuple(map(str, subject.heads)))
        panels, steps = [Panel("", heads, heads, tensors["similarity"].numpy())], (1, 1)
    else:
        panels, steps = _weights(subject, style, tensors["raster"].numpy())
    for panel in panels:
        if np.isinf(panel.values).any():
            raise InvalidRequest.where("", f"finite numbers to draw for {panel.title or subject.kind}", "infinity")
    title = _title(subject) if subject.title is None else subject.title
    return Picture(title, tuple(panels), _scale(subject, panels), _note(subject, steps), {"Title": title, **about})


def _steps(subject: Subject, style: Style) -> tuple[int, int]:
    panels = len(subject.heads) if subject.kind == "heads" else 1
    side = resolution(panels, style, CELLS)
    return -(-subject.queries // side), -(-subject.keys // side)


def _weights(subject: Subject, style: Style, raster: Array) -> tuple[list[Panel], tuple[int, int]]:
    steps = _steps(subject, style)
    rows = Axis("query", subject.queries, steps[0], subject.query_words)
    columns = Axis("key", subject.keys, steps[1], subject.key_words)
    several = subject.kind == "heads"
    panels = []
    for i, values in enumerate(raster):
        empty = tuple(np.flatnonzero(np.isnan(values).all(1)).tolist())
        panels.append(Panel(f"head {subject.heads[i]}" if several else "", rows, columns, values, empty))
    return panels, steps


def _outputs(subject: Subject, style: Style, tensors: Mapping[str, Tensor]) -> tuple[list[Panel], tuple[int, int]]:
    """The heads' outputs side by side, and what the output projection makes of them."""
    titles = {"concatenated": "heads' outputs, side by side", "output": "after the output projection"}
    named = {name: title for name, title in titles.items() if name in tensors}  # without projections there is no second
    widest = max(tensors[name].shape[-1] for name in named)
    across = -(-widest // resolution(1, style, CELLS**2, WIDEST))
    most = min(resolution(1, style, CELLS), CELLS // 2 // -(-widest // across))
    steps = -(-subject.queries // most), across
    panels = []
    for name, title in named.items():
        values = tensors[name][subject.item].double()
        if not torch.isfinite(values).all():
            raise InvalidRequest.where("", f"finite numbers in {name}", "NaN or infinity")
        heads = tuple(map(str, subject.heads)) if name == "concatenated" else ()
        rows = Axis("query", subject.queries, steps[0], subject.query_words)
        columns = Axis("dimension" if name == "output" else "head, its dimensions side by side", values.shape[1], steps[1], groups=heads)
        panels.append(Panel(title, rows, columns, pool_array(values, *steps, subject.pooled).numpy()))
    return panels, steps


def _scale(subject: Subject, panels: Sequence[Panel]) -> Scale:
    name = SCALES.get(subject.kind, "attention weight")
    largest = max((float(np.nanmax(np.abs(panel.values), initial=0.0)) for panel in panels), default=0.0)
    if subject.kind == "similarity":
        largest = 1.0  # whatever they are: cosines of weights, which are never negative
    high = min(max(subject.maximum or largest or 1.0, SMALLEST), 1 / SMALLEST)
    if subject.kind == "concatenation":
        return Scale("value, 0 in the middle", -high, high, diverging=True)
    if subject.logarithmic:
        positive = [panel.values[panel.values > 0] for panel in panels]
        smallest = min((float(values.min()) for values in positive if values.size), default=high)
        return Scale(name, min(max(smallest, high * DARKEST), high / 10), high, logarithmic=True)
    return Scale(name, 0.0, high)


def _title(subject: Subject) -> str:
    return {
        "heads": "Attention weights by head",
        "head": f"Attention weights, head {subject.heads[0]}",
        "mean": f"Attention weights, mean of {len(subject.heads)} heads",
        "std": f"Attention weights, standard deviation across {len(subject.heads)} heads",
        "similarity": "How similarly the heads attend",
        "concatenation": "Outputs of the heads",
    }[subject.kind]


def _note(subject: Subject, steps: tuple[int, int]) -> str:
    if max(steps) == 1:
        return ""
    how = {"mean": "mean", "max": "maximum"}[subject.pooled]
    if subject.kind == "concatenation":
        return f"Pooled: each cell is the {how} of up to {steps[0]} queries x {steps[1]} dimensions."
    pairs = f"{subject.queries} queries x {subject.keys} keys"
    return f"Pooled: {pairs}; each cell is the {how} over the pairs that may attend among up to {steps[0]} x {steps[1]}."
