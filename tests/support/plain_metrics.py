"""The oracle of the metrics: each in NumPy float64 as its definition reads, with loops over items, heads and queries; ablations run the
layer's output projection again. Shares no code with the service; starts from the outputs of the reference, with a batch axis.
"""

import math
from itertools import product
from typing import Any

import numpy as np

from attend.attention.reference.forward import Outputs
from attend.tensors import Array


class Item:
    """One item of a batch: weights [h, q, k], values [h, k, d], head outputs [h, q, d], and the other inputs of the metrics."""

    def __init__(self, ref: Outputs, b: int, heads: int, real: Array, counted: Array, positions: Array, words: list[str]) -> None:
        self.weights, self.outputs = ref.attention_weights[b], ref.head_outputs[b]
        self.values = np.repeat(ref.value_projection[b], heads // ref.value_projection.shape[1], 0)
        self.visible = ~np.isneginf(ref.scores[b])
        self.real, self.positions, self.words = real, positions, words
        self.counts = counted[None] & ~ref.fully_masked[b]
        self.h, self.q, self.k = self.weights.shape

    def row(self, h: int, i: int) -> Array:
        return self.weights[h, i] / self.weights[h, i].sum()

    def over_rows(self, number: Any) -> Array:
        """[h, q] of number(row, h, i), NaN where a row does not count."""
        made = np.full((self.h, self.q), np.nan)
        for h, i in product(range(self.h), range(self.q)):
            if self.counts[h, i]:
                made[h, i] = number(self.row(h, i), h, i)
        return made


def mean(numbers: Array) -> Array:
    """Mean of the defined values over the last axis."""
    return np.array([np.mean(row[~np.isnan(row)]) if (~np.isnan(row)).any() else np.nan for row in numbers])


def entropy_of(row: Array) -> float:
    return -sum(a * math.log(a) for a in row if a > 0)


def cosine(x: Array, y: Array) -> float:
    size = np.linalg.norm(x) * np.linalg.norm(y)
    return float((x * y).sum() / size) if size else np.nan


def row_metrics(item: Item, window: int, mass: float) -> dict[str, Array]:
    """The metrics that are means over rows."""

    def normalised(row: Array, h: int, i: int) -> float:
        seen = item.visible[h, i].sum()
        return entropy_of(row) / math.log(seen) if seen > 1 else np.nan

    def of_mass(row: Array, h: int, i: int) -> int:
        sum_so_far = 0.0
        for n, a in enumerate(sorted(row, reverse=True), 1):
            sum_so_far += a
            if sum_so_far >= mass - 1e-6:
                return n
        return len(row)

    def on(pattern: Any, must_be: bool) -> Any:
        def number(row: Array, h: int, i: int) -> float:
            keys = [j for j in range(item.k) if pattern(int(item.positions[i]), j, i)]
            if must_be:
                keys = [j for j in keys if item.visible[h, i, j]]
            return np.nan if must_be and not keys else sum(row[j] for j in keys)

        return number

    first = int(np.argmax(item.real))
    words = item.words
    made = {
        "entropy_per_query": item.over_rows(lambda row, h, i: entropy_of(row)),
        "normalised_entropy": item.over_rows(normalised),
        "confidence_per_query": item.over_rows(lambda row, h, i: row.max()),
        "keys_for_mass": item.over_rows(of_mass),
        "first_key_mass": item.over_rows(lambda row, h, i: row[first]),
        "self_share": item.over_rows(on(lambda p, j, i: j == p, False)),
        "local_share": item.over_rows(on(lambda p, j, i: 0 < abs(j - p) <= window, False)),
        "global_share": item.over_rows(on(lambda p, j, i: abs(j - p) > window, False)),
        "mean_distance": item.over_rows(lambda row, h, i: sum(a * abs(j - item.positions[i]) for j, a in enumerate(row))),
        "previous_token_score": item.over_rows(on(lambda p, j, i: j == p - 1, True)),
    }
    if words:
        query_words, key_words = words

        def follows(p: int, j: int, i: int) -> bool:
            return 0 <= j - 1 < p and bool(item.real[j - 1]) and key_words[j - 1] == query_words[i]

        made["duplicate_token_score"] = item.over_rows(on(lambda p, j, i: j < p and key_words[j] == query_words[i], True))
        made["induction_score"] = item.over_rows(on(follows, True))
    return {name: x if name.endswith("_per_query") else mean(x) for name, x in made.items()} | {
        name.removesuffix("_per_query"): mean(made[name]) for name in made if name.endswith("_per_query")
    }


def between_metrics(item: Item) -> dict[str, Any]:
    """The metrics of pairs of heads, on the rows that count for both."""
    pairs = {name: np.full((item.h, item.h), np.nan) for name in ("cosine_similarity", "jensen_shannon", "position", "value", "output")}
    for i, j in product(range(item.h), range(item.h)):
        rows = [t for t in range(item.q) if item.counts[i, t] and item.counts[j, t]]
        pairs["value"][i, j] = cosine(item.values[i][item.real], item.values[j][item.real])
        of = [(item.outputs[h] * item.counts[h][:, None]) for h in (i, j)]
        pairs["output"][i, j] = cosine(*of)
        if not rows:
            continue
        p, q = (np.array([item.row(h, t) for t in rows]) for h in (i, j))
        pairs["cosine_similarity"][i, j] = cosine(p, q)
        mixed = (p + q) / 2
        pairs["jensen_shannon"][i, j] = np.mean(
            [entropy_of(m) - (entropy_of(a) + entropy_of(b)) / 2 for m, a, b in zip(mixed, p, q, strict=True)]
        )
        pairs["position"][i, j] = np.abs(p * q).sum(1).mean()
    deviation = np.full(item.q, np.nan)
    for t in range(item.q):
        if item.counts[:, t].all():
            seen = item.visible[:, t].any(0)
            deviation[t] = np.array([item.row(h, t) for h in range(item.h)]).std(0)[seen].mean()
    return {
        "cosine_similarity": pairs["cosine_similarity"],
        "jensen_shannon": pairs["jensen_shannon"],
        "position_disagreement": -pairs["position"].mean(),
        "subspace_disagreement": -pairs["value"].mean(),
        "output_disagreement": -pairs["output"].mean(),
        "deviation_across_heads": deviation,
    }


def output_metrics(item: Item, weight: Array, bias: Array, head_scale: Array, direction: Array | None) -> dict[str, Any]:
    """The metrics of the output: heads are removed and the projection is computed again. `weight` is [out, h * d]."""
    some = item.counts.any(0)
    heads = item.outputs * item.counts[:, :, None]
    d = heads.shape[-1]
    split = [weight[:, h * d : (h + 1) * d] for h in range(item.h)]

    def project(x: Array) -> Array:
        return (np.concatenate(list(x), -1) @ weight.T + bias)[some]

    y = project(heads)
    added = np.array([(heads[h] @ split[h].T)[some] for h in range(item.h)])
    toward = y if direction is None else direction[some]
    contribution = np.array([(toward * part).sum() if some.any() else np.nan for part in added])
    made: dict[str, Any] = {
        "contribution": contribution,
        "gradient_importance": np.abs(contribution) / np.linalg.norm(contribution),
        "value_norms": np.full((item.h, item.k), np.nan),
        "value_norm_weights": np.full(item.weights.shape, np.nan),
    }
    for name in ("zero_ablation", "mean_ablation"):
        changes, cosines = [], []
        for h in range(item.h):
            without = heads.copy()
            counted = item.counts[h]
            without[h][counted] = heads[h][counted].mean(0) if name == "mean_ablation" and counted.any() else 0
            moved = project(without)
            never = name == "mean_ablation" and not counted.any()
            changes.append(np.nan if never else np.linalg.norm(moved - y) / np.linalg.norm(y))
            cosines.append(np.nan if never else cosine(moved, y))
        made[name] = {"relative_change": np.array(changes), "cosine": np.array(cosines)}
    for h, j in product(range(item.h), range(item.k)):
        if item.real[j]:
            made["value_norms"][h, j] = np.linalg.norm(split[h] @ item.values[h, j]) * abs(head_scale[h])
        for i in range(item.q):
            if item.counts[h, i]:
                made["value_norm_weights"][h, i, j] = 0.0
                if item.weights[h, i, j]:
                    made["value_norm_weights"][h, i, j] = item.weights[h, i, j] * made["value_norms"][h, j]
    left, order, errors = list(range(item.h)), [], []
    while left:
        losses = [np.linalg.norm(added[[*order, h]].sum(0)) for h in left]
        order.append(left.pop(int(np.argmin(losses))))
        errors.append(min(losses) / np.linalg.norm(y))
    made["pruning_order"] = {"heads": np.array(order), "errors": np.array(errors)}
    return made


def strongest(item: Item, n: int) -> list[list[tuple[float, int, int]]]:
    """(minus the weight, query, key) of each head's links, largest first, of rows that see more keys than one."""
    found: list[list[tuple[float, int, int]]] = [[] for _ in range(item.h)]
    for h, i, j in np.ndindex(item.weights.shape):
        if item.counts[h, i] and item.visible[h, i].sum() > 1 and item.weights[h, i, j] > 0:
            found[h].append((-item.weights[h, i, j], i, j))
    return [sorted(links)[:n] for links in found]
