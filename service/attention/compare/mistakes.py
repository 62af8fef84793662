"""Computes attention with known mistakes, and searches for the mistake that explains a wrong result.

A mistake is named only if computing it gives the candidate's numbers within the tolerance of the case. Single mistakes are tried
first, then pairs.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import combinations, permutations
from typing import Any

import numpy as np

from service.attention.compare.cases import CheckCase
from service.attention.compare.weights import cut_packed
from service.attention.reference.forward import merge_heads, project, softmax, split_heads
from service.spec import PROJECTIONS, LayerSpec
from service.tensors import BY_TORCH, Array

Changes = dict[str, Any]
SOFTMAX_AXES = {"queries": 2, "heads": 1, "batch": 0}


# wrong ways to split [b, n, h*d] into heads and to merge [b, h, n, d]
RESHAPE: Changes = {"split": lambda x, h: x.reshape(len(x), h, x.shape[1], -1), "merge": lambda x: x.reshape(len(x), x.shape[2], -1)}
INTERLEAVE: Changes = {
    "split": lambda x, h: x.reshape(*x.shape[:2], -1, h).transpose(0, 3, 1, 2),
    "merge": lambda x: x.transpose(0, 2, 3, 1).reshape(len(x), x.shape[2], -1),
}
NO_TRANSPOSE: Changes = {"split": lambda x, h: x.reshape(*x.shape[:2], h, -1), "merge": lambda x: x.reshape(*x.shape[:2], -1)}
SEQUENCE_FIRST: Changes = {
    "split": lambda x, h: x.reshape(*x.shape[:2], h, -1).transpose(1, 2, 0, 3),
    "merge": lambda x: x.transpose(2, 0, 1, 3).reshape(x.shape[2], len(x), -1),
}

CONSTANTS = (32, 64, 80, 96, 128, 256, 512, 768, 1024)  # usual values of head_dim and d_model

# (hint, changes): the hint completes "this is what comes out …"; the changes are arguments of `attend_with_mistakes`
MISTAKES: tuple[tuple[str, Changes], ...] = (
    ("when the scores are not divided by sqrt(head_dim)", {"scale": lambda spec: 1.0}),
    ("when the scores are divided by sqrt(d_model) and not by sqrt(head_dim)", {"scale": lambda spec: spec.d_model**-0.5}),
    (
        "when the scores are divided by head_dim and not by its square root (or by the root twice)",
        {"scale": lambda spec: 1 / spec.head_dim},
    ),
    ("when the scores are multiplied by sqrt(head_dim) and not divided", {"scale": lambda spec: spec.head_dim**0.5}),
    *(
        (
            f"when the scores are divided by the constant sqrt({n}) and not by sqrt(head_dim)",
            {"scale": lambda spec, n=n: n**-0.5},
        )
        for n in CONSTANTS
    ),
    ("when the mask is inverted: it blocks what it should let through (see mask_means)", {"visible": lambda mask, visible: ~mask}),
    ("when the mask is ignored", {"visible": lambda mask, visible: np.ones_like(mask)}),
    ("when it is causal without being asked (see causal)", {"visible": lambda mask, visible: np.tril(mask)}),
    ("when the mask is transposed", {"visible": lambda mask, visible: mask.swapaxes(1, 2) if mask.shape[1] == mask.shape[2] else visible}),
    (
        "when each query also sees the key after its last one (a causal mask off by one)",
        {"visible": lambda mask, visible: visible | _next_key(visible)},
    ),
    ("when blocked scores are set to about 0 and not to -inf", {"fill": "zero"}),
    ("when the weights of blocked keys are set to 0 after the softmax, so that rows no longer sum to 1", {"fill": "after"}),
    ("when the mask's ones (1 = attend) are added to the scores", {"fill": "add"}),
    ("when the mask's ones (1 = blocked) are added to the scores", {"fill": "add_blocked"}),
    ("when heads are split by a reshape without a transpose", {"split": RESHAPE["split"]}),
    ("when heads are merged by a reshape without a transpose", {"merge": RESHAPE["merge"]}),
    ("when heads are both split and merged by a reshape without a transpose", RESHAPE),
    ("when heads are split with the head as the fastest axis", {"split": INTERLEAVE["split"]}),
    ("when heads are merged with the head as the fastest axis", {"merge": INTERLEAVE["merge"]}),
    ("when heads are split and merged with the head as the fastest axis", INTERLEAVE),
    (
        "when heads attend to each other at every position, because the transpose after the split is missing (see layout)",
        NO_TRANSPOSE,
    ),
    (
        "when the first axis is taken for the sequence and the second for the batch (see batch_first)",
        SEQUENCE_FIRST,
    ),
    ("when there is only one head", {"split": lambda x, heads: x[:, None], "scale": lambda spec: spec.d_model**-0.5}),
    *((f"when the softmax runs over the {name} and not over the keys", {"axis": axis}) for name, axis in SOFTMAX_AXES.items()),
    ("when exp overflows, because the largest score of the row is not subtracted first", {"overflow": True}),
    ("when the scores are returned and not the weights", {"returns": "scores"}),
    ("when every matrix is applied the other way round (x @ W against x @ W.T, see orientation)", {"flip": True}),
    *(
        ("when one matrix for query, key and value is cut the other way, as [3, h, d] against [h, 3, d] (see fused)", {"recut": order})
        for order in ("q,k,v", "per_head")
    ),
    ("when the biases are left out", {"biases": False}),
    ("when the output projection is left out", {"projects_output": False}),
    ("when the query is added to the output (a residual connection)", {"residual": True}),
    ("when key and value are exchanged", {"swap": True}),
    *(
        (f"when the matrices of query, key, value are taken to be those of {', '.join(order)}", {"order": order})
        for order in permutations(("query", "key", "value"))
        if order != ("query", "key", "value")
    ),
)


def explain(
    spec: LayerSpec,
    weights: Mapping[str, Array],
    case: CheckCase,
    results: Mapping[str, tuple[Array, float]],
    dtype: str,
    found: Collection[str] = (),
) -> tuple[str, ...]:
    """The hints of the mistakes whose numbers these are; empty if no known mistake gives them, nor any two together.

    `results` has "output" and possibly "attention_weights", each with its tolerance. `dtype` is the candidate's: it decides where exp
    overflows. Mistakes that were `found` in another case are tried first.
    """
    for hints, changes in sorted(_combinations(), key=lambda combination: -len({*found} & {*combination[0]})):
        try:
            wrong, rows = attend_with_mistakes(spec, weights, case, dtype, **changes)
        except ValueError:  # shapes for which this mistake cannot be made
            continue
        if rows.any() and all(_same(got, wrong[name], rows, tolerance) for name, (got, tolerance) in results.items()):
            return tuple(hints)
    return ()


def attend_with_mistakes(
    spec: LayerSpec,
    weights: Mapping[str, Array],
    case: CheckCase,
    dtype: str = "float64",
    *,
    scale: Callable[[LayerSpec], float] | None = None,
    visible: Callable[[Array, Array], Array] | None = None,
    fill: str = "-inf",
    split: Callable[[Array, int], Array] = split_heads,
    merge: Callable[[Array], Array] = merge_heads,
    axis: int = -1,
    overflow: bool = False,
    returns: str = "weights",
    flip: bool = False,
    biases: bool = True,
    projects_output: bool = True,
    residual: bool = False,
    swap: bool = False,
    recut: str | None = None,
    order: tuple[str, str, str] = ("query", "key", "value"),
) -> tuple[dict[str, Array], Array]:
    """The output and weights of the case with these mistakes, and which rows [b, q] to compare.

    Rows without a key are not compared: libraries differ there.
    """
    cut = weights if recut is None else {**weights, **_recut(weights, spec.num_heads, recut)}
    used = {name: w for name, w in cut.items() if biases or not name.endswith(".bias")}
    used = {name: w.T if flip and w.ndim == 2 else w for name, w in used.items()}
    inputs = (case.query, case.value, case.key) if swap else (case.query, case.key, case.value)
    q, k, v = (split(project(x, used, name), spec.num_heads) for x, name in zip(inputs, order, strict=True))
    mask = case.visible if visible is None else visible(case.mask, case.visible)
    with np.errstate(all="ignore"):
        raw = (spec.scale if scale is None else scale(spec)) * (q @ k.swapaxes(-1, -2))
        scores = fill_scores(raw, mask[:, None], fill)
        exponentials = np.exp(scores.astype(BY_TORCH[dtype].numpy)).astype(np.float64)
        attended = (
            exponentials / exponentials.sum(axis=axis, keepdims=True)
            if overflow
            else np.moveaxis(softmax(np.moveaxis(scores, axis, -1))[0], -1, axis)
        )
        attended = attended * mask[:, None] if fill == "after" else attended
        output = merge(attended @ v)
        if projects_output:
            output = project(output, used, "output")
    outputs = {"output": output + case.query if residual else output, "attention_weights": scores if returns == "scores" else attended}
    return outputs, np.asarray(mask.any(axis=-1))


def _recut(weights: Mapping[str, Array], heads: int, order: str) -> dict[str, Array]:
    """The projections packed in the other order, then cut in this one. ValueError: their shapes differ."""
    cut: dict[str, Array] = {}
    for kind in ("weight", "bias"):
        names = [f"{part}.{kind}" for part in PROJECTIONS[:3]]
        if all(name in weights for name in names):
            parts = [weights[name].reshape(heads, -1, *weights[name].shape[1:]) for name in names]
            packed = np.stack(parts, axis=1 if order == "q,k,v" else 0)
            cut |= zip(names, cut_packed("", packed.reshape(-1, *packed.shape[3:]), heads, order), strict=True)
    return cut


def fill_scores(raw: Array, mask: Array, fill: str) -> Array:
    """Scores [b, h, q, k] after a mask [b, 1, q, k], applied correctly or in one of the wrong ways."""
    if mask.all():
        return raw
    match fill:
        case "after":
            return raw
        case "add":
            return raw + mask
        case "add_blocked":
            return raw + ~mask
    return np.where(mask, raw, 0.0 if fill == "zero" else -np.inf)


def _combinations() -> Iterator[tuple[list[str], Changes]]:
    for count in (1, 2):
        for mistakes in combinations(MISTAKES, count):
            names = [name for _, changes in mistakes for name in changes]
            if len(names) == len(set(names)):
                yield [hint for hint, _ in mistakes], {name: change for _, changes in mistakes for name, change in changes.items()}


def _next_key(visible: Array) -> Array:
    """True at the key after the last visible one of each query: [b, q, k]."""
    last = visible.shape[-1] - 1 - np.argmax(visible[..., ::-1], axis=-1)
    later: Array = np.arange(visible.shape[-1]) == last[..., None] + 1
    return later


def _same(got: Array, wrong: Array, rows: Array, tolerance: float) -> bool:
    if got.shape != wrong.shape:
        return False
    if not rows.all():
        if got.ndim == 4:  # [b, h, q, k] -> [b, q, h, k]
            got, wrong = got.swapaxes(1, 2), wrong.swapaxes(1, 2)
        got, wrong = got[rows], wrong[rows]
    return np.allclose(got, wrong, rtol=0, atol=tolerance, equal_nan=True)
