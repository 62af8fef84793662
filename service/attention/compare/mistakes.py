"""The known mistakes, and the search for those that explain a wrong result.

A mistake is named only if making it gives the candidate's numbers within the tolerance of the case. Single mistakes are tried first, then
pairs.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, permutations

import numpy as np

from service.attention.compare.cases import Computation
from service.attention.compare.changes import (
    ANY_HEAD_COUNT,
    MERGE,
    SPLIT,
    UNMASK,
    Change,
    Function,
    add_mask,
    all_of,
    change_mask,
    change_part,
    change_softmax,
    change_spec,
    exp_without_maximum,
    map_weights,
    only_if,
    repack,
    replace_steps,
    replace_weights,
    rotate_with_angles_of_other_pairs,
    share_by_reshape,
    share_by_reshape_after_rope,
    share_with_first_head,
    softmax_over_axis,
    split_and_merge,
    swap_weights,
    tile_kv_heads,
)
from service.attention.compare.weights import QKV, QUERY_GATE
from service.attention.reference.forward import Layer
from service.spec import LayerSpec
from service.spec_parts import Rope, Window
from service.tensors import Array

CONSTANTS = (32, 64, 80, 96, 128, 256, 512, 768, 1024)  # usual values of head_dim and d_model
LEFT_OUT = {  # field of a spec -> its name in hints
    "rope": "RoPE",
    "qk_norm": "the norm of queries and keys",
    "output_gate": "the output gate",
    "softcap": "the softcap",
    "window": "the window",
    "chunk_size": "the division into chunks",
    "query_scale": "the factor on queries by their position",
    "alibi": "ALiBi",
    "relative_bias": "the relative bias",
    "grid_bias": "the bias by positions in a grid",
    "sinks": "the sink of the softmax",
}


def _with_power_of_mscale(spec: LayerSpec, power: int) -> float:
    """The scale of a latent layer, mscale² / √head_dim, with another power of mscale."""
    root = spec.head_dim**-0.5
    return (spec.scale / root) ** (power / 2) * root if spec.latent else spec.scale


def _identity_output(c: Computation) -> Mapping[str, Array]:
    identity = {"output.weight": np.eye(c.spec.concatenated_dim), "output.bias": np.zeros(1)}
    return identity if "output.weight" in c.weights else {}


def _with_next_key(visible: Array) -> Array:
    """The mask with the key after the last visible one of each query: [b, q, k]."""
    last = visible.shape[-1] - 1 - np.argmax(visible[..., ::-1], axis=-1)
    return np.asarray(visible | (np.arange(visible.shape[-1]) == last[..., None] + 1))


def _unmasked(mask: Array, visible: Array) -> Array:
    """The mask [b, q, k] that the candidate's own causality leaves without the one that is passed."""
    everything = np.ones_like(mask)
    return np.tril(everything) if (mask & ~visible).any() else everything


def _wider(window: Window | None, by: int) -> Window | None:
    return window and window.model_copy(update={"left": None if window.left is None else max(window.left + by, 0)})


def _with_linear_scaling(rope: Rope | None) -> Rope | None:
    return rope and rope.model_copy(update={"scaling": rope.scaling and rope.scaling.model_copy(update={"type": "linear"})})


SCALES: dict[str, Function] = {
    "the scores are not divided by sqrt(head_dim)": lambda spec: 1.0,
    "mscale is forgotten, and the scores are divided by sqrt(head_dim) alone": lambda spec: _with_power_of_mscale(spec, 0),
    "the scores are multiplied by mscale and not by its square": lambda spec: _with_power_of_mscale(spec, 1),
    "the layer's own scale is ignored, and the scores are divided by sqrt(head_dim)": lambda spec: spec.head_dim**-0.5,
    "the scores are divided by sqrt(d_model) and not by sqrt(head_dim)": lambda spec: spec.d_model**-0.5,
    "the scores are divided by head_dim and not by its square root (or by the root twice)": lambda spec: 1 / spec.head_dim,
    "the scores are multiplied by sqrt(head_dim) and not divided": lambda spec: spec.head_dim**0.5,
} | {f"the scores are divided by the constant sqrt({n}) and not by sqrt(head_dim)": lambda spec, n=n: n**-0.5 for n in CONSTANTS}
# What is changed -> the mistake, as in "this is what comes out when …" -> the change. Mistakes that change the same are not combined.
MISTAKES: dict[str, dict[str, Change]] = {
    "scale": {hint: change_spec(scale=scale) for hint, scale in SCALES.items()},
    "mask": {
        "the mask is inverted: it blocks what it should let through (see mask_means)": change_mask(lambda mask, _: ~mask),
        "sequences leak across segments: queries attend to keys of other sequences in their row": only_if(
            lambda c: c.case.segments is not None, change_mask(_unmasked)
        ),
        "the mask is ignored": change_mask(_unmasked),
        "it is causal without being asked (see causal)": change_mask(lambda mask, _: np.tril(mask)),
        "the mask is transposed": change_mask(lambda mask, seen: mask.swapaxes(1, 2) if mask.shape[1] == mask.shape[2] else seen),
        "each query also sees the key after its last one (a causal mask off by one)": change_mask(
            lambda _, visible: _with_next_key(visible)
        ),
    },
    "exp": {"exp overflows, because the largest score of the row is not subtracted first": change_softmax(exp_without_maximum)},
    "blocked": {
        "blocked scores are set to about 0 and not to -inf": change_softmax(
            lambda c, softmax, scores, sinks: softmax(np.where(np.isneginf(scores), 0.0, scores), sinks)
        ),
        "the weights of blocked keys are set to 0 after the softmax, so that rows no longer sum to 1": all_of(
            change_softmax(lambda c, softmax, scores, sinks: softmax(scores, sinks) * c.case.visible[:, None]), UNMASK
        ),
        "the mask's ones (1 = attend) are added to the scores": add_mask(lambda visible: visible),
        "the mask's ones (1 = blocked) are added to the scores": add_mask(lambda visible: ~visible),
    },
    "axis": {
        "the softmax runs over the queries and not over the keys": softmax_over_axis(2),
        "the softmax runs over the heads and not over the keys": softmax_over_axis(1),
        "the softmax runs over the batch and not over the keys": softmax_over_axis(0),
    },
    "split": {
        "heads are split by a reshape without a transpose": replace_steps(split_heads=SPLIT["reshape"]),
        "heads are split with the head as the fastest axis": replace_steps(split_heads=SPLIT["head fastest"]),
    },
    "merge": {
        "heads are merged by a reshape without a transpose": replace_steps(merge_heads=MERGE["reshape"]),
        "heads are merged with the head as the fastest axis": replace_steps(merge_heads=MERGE["head fastest"]),
    },
    "split + merge": {
        "heads are both split and merged by a reshape without a transpose": split_and_merge("reshape"),
        "heads are split and merged with the head as the fastest axis": split_and_merge("head fastest"),
        "heads attend to each other at every position, since no transpose follows the split (see layout)": all_of(
            ANY_HEAD_COUNT, split_and_merge("not transposed")
        ),
        "the first axis is taken for the sequence and the second for the batch (see batch_first)": split_and_merge("sequence first"),
    },
    "split + scale": {
        "there is only one head": all_of(
            ANY_HEAD_COUNT, replace_steps(split_heads=lambda layer, x, h: x[:, None]), change_spec(scale=lambda spec: spec.d_model**-0.5)
        )
    },
    "groups": {"query head i uses head i mod num_kv_heads of the keys": replace_steps(repeat_kv_heads=tile_kv_heads)},
    "weights": {
        "every matrix is applied the other way round (x @ W against x @ W.T, see orientation)": map_weights(
            ("query.weight", "key.weight", "value.weight", "output.weight"), np.transpose
        ),
    }
    | {
        f"the matrices of query, key, value are taken to be those of {', '.join(order)}": swap_weights(QKV, order)
        for order in permutations(QKV)
        if order != QKV
    },
    "order": {
        "one matrix for query, key and value is cut as [3, h, d] and not as [h, 3, d] (see fused)": repack(QKV, "q,k,v", "per_head"),
        "one matrix for query, key and value is cut as [h, 3, d] and not as [3, h, d] (see fused)": repack(QKV, "per_head", "q,k,v"),
    },
    "biases": {"the biases are left out": map_weights(".bias", np.zeros_like)},
    "output": {"the output projection is left out": replace_weights(_identity_output)},
    "residual": {"the query is added to the output (a residual connection)": lambda c: replace(c, residual=True)},
    "returned": {"the scores are returned and not the weights": lambda c: replace(c, returned="scores")},
    "inputs": {"key and value are exchanged": lambda c: replace(c, case=replace(c.case, key=c.case.value, value=c.case.key))},
    **{
        name: {f"{words} is left out": change_spec(**{name: lambda spec, name=name: False if getattr(spec, name) is True else None})}
        for name, words in LEFT_OUT.items()
    },
    "normalizer": {"the scores are normalised by a plain softmax": change_spec(normalizer=lambda spec: "softmax")},
    "buckets": {
        "relative biases are off by one: each is that of the bucket before": map_weights("relative_bias", lambda w: np.roll(w, 1, axis=0)),
        "relative biases are off by one: each is that of the bucket after": map_weights("relative_bias", lambda w: np.roll(w, -1, axis=0)),
        **{
            f"relative biases are off by one: each is that of the key {words}": only_if(
                lambda c: c.spec.relative_bias,
                replace_steps(position_bias=lambda layer, ahead, by=by: Layer.position_bias(layer, ahead + by)),
            )
            for words, by in (("after", 1), ("before", -1))
        },
    },
    "rope scaling": {
        "the scaling of RoPE's frequencies is ignored": change_part("rope", scaling=None, frequencies=None, attention_factor=1.0),
        "every frequency of RoPE is divided by the factor, and not the low ones alone": change_spec(
            rope=lambda spec: _with_linear_scaling(spec.rope)
        ),
    },
    "rope factor": {"RoPE's attention_factor is ignored": change_part("rope", attention_factor=1.0)},
    "rope theta": {"RoPE has theta 10000 and not the layer's": change_part("rope", theta=10000.0)},
    "rope pairs": {
        "RoPE rotates halves of each head and not neighbouring pairs": change_part("rope", interleaved=False),
        "RoPE rotates neighbouring pairs and not halves of each head": change_part("rope", interleaved=True),
    },
    "rope turn": {
        "RoPE turns the other way: its sines have the opposite sign": replace_steps(
            rotate=lambda layer, x, name, positions: Layer.rotate(layer, x, name, -positions)
        ),
        "RoPE rotates the queries and not the keys": replace_steps(
            rotate=lambda layer, x, name, positions: Layer.rotate(layer, x, name, positions) if name == "query" else x
        ),
        "RoPE's angles are repeated as for neighbours and applied to halves (repeat_interleave for cat), or the reverse": replace_steps(
            rotate=rotate_with_angles_of_other_pairs
        ),
    },
    "norm order": {
        "the norm of queries and keys is applied after RoPE and not before": change_part("qk_norm", after_rope=True),
        "the norm of queries and keys is applied before RoPE and not after": change_part("qk_norm", after_rope=False),
    },
    "norm width": {
        "the norm is taken per head and not over the full width of all heads": change_part("qk_norm", over="head"),
        "the norm is taken over the full width of all heads and not per head": change_part("qk_norm", over="all"),
    },
    "norm weights": {
        "1 + w is forgotten: norms multiply by their parameter w (see norm_weights)": map_weights("_norm.weight", lambda w: w - 1),
        "norms multiply by 1 + w and not by their parameter w (see norm_weights)": map_weights("_norm.weight", lambda w: w + 1),
    },
    "gate": {
        "the halves of one matrix for query and gate are swapped": swap_weights(QUERY_GATE, QUERY_GATE[::-1]),
        "one matrix for query and gate is cut as [2, h, d] and not as [h, 2, d] (see fused)": repack(QUERY_GATE, "q,k,v", "per_head"),
        "one matrix for query and gate is cut as [h, 2, d] and not as [2, h, d] (see fused)": repack(QUERY_GATE, "per_head", "q,k,v"),
    },
    "window length": {
        "the window has one key more": change_spec(window=lambda spec: _wider(spec.window, 1)),
        "the window has one key less": change_spec(window=lambda spec: _wider(spec.window, -1)),
    },
    "rotary part": {
        f"the rotary part of the keys is not shared across heads, but {words}": only_if(lambda c: c.spec.latent, change)
        for words, change in (
            ("in the first head alone", replace_steps(share=share_with_first_head)),
            ("spread by a reshape without a transpose", replace_steps(share=share_by_reshape)),
            ("spread by a reshape without a transpose, after RoPE", replace_steps(rotate=share_by_reshape_after_rope)),
        )
    },
}


def explain(right: Computation, results: Mapping[str, Array], earlier: Collection[str] = ()) -> tuple[str, ...]:
    """The mistakes whose numbers these are; empty if no known mistake gives them, nor any two together.

    `results` has "output" and possibly "attention_weights". The mistakes of `earlier` cases are tried first.
    """
    for mistakes in sorted(_combinations(right), key=lambda tried: -len({*earlier}.intersection(hint for hint, _ in tried))):
        try:
            wrong = all_of(*(change for _, change in mistakes))(right).run()
        except ValueError:  # shapes for which these mistakes cannot be made
            continue
        if wrong.rows.any() and all(wrong.agrees(name, got) for name, got in results.items()):
            return tuple(hint for hint, _ in mistakes)
    return ()


def _combinations(right: Computation) -> Iterator[tuple[tuple[str, Change], ...]]:
    """Single mistakes that can be made, then pairs that do not change the same."""
    possible: list[tuple[set[str], tuple[str, Change]]] = []
    for changed, mistakes in MISTAKES.items():
        for hint, change in mistakes.items():
            with suppress(ValueError):
                change(right)
                possible.append(({*changed.split(" + ")}, (hint, change)))
    yield from ((mistake,) for _, mistake in possible)
    yield from ((first, second) for (one, first), (other, second) in combinations(possible, 2) if one.isdisjoint(other))
