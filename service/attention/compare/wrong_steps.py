"""Wrong ways to do a step of the reference: methods in place of those of `Layer`, and changes that replace them."""

import numpy as np

from service.attention.compare.changes import UNMASK, Change, Computation, Function, Impossible, replace_steps
from service.attention.reference.forward import Layer
from service.attention.reference.positions import frequencies
from service.tensors import BY_TORCH, Array

# Wrong ways to split [b, n, h*d] into heads and to merge [b, h, n, d].
SPLIT: dict[str, Function] = {
    "reshape": lambda layer, x, h: x.reshape(len(x), h, x.shape[1], -1),
    "head fastest": lambda layer, x, h: x.reshape(*x.shape[:2], -1, h).transpose(0, 3, 1, 2),
    "not transposed": lambda layer, x, h: x.reshape(*x.shape[:2], h, -1),
    "sequence first": lambda layer, x, h: x.reshape(*x.shape[:2], h, -1).transpose(1, 2, 0, 3),
}
MERGE: dict[str, Function] = {
    "reshape": lambda layer, x: x.reshape(len(x), x.shape[2], -1),
    "head fastest": lambda layer, x: x.transpose(0, 2, 3, 1).reshape(len(x), x.shape[2], -1),
    "not transposed": lambda layer, x: x.reshape(*x.shape[:2], -1),
    "sequence first": lambda layer, x: x.transpose(2, 0, 1, 3).reshape(x.shape[2], len(x), -1),
}
# Needed by splits that change the number of heads: keys and values are not repeated, and heads have no biases of their own.
ANY_HEAD_COUNT = replace_steps(repeat_kv_heads=lambda layer, x: x, position_bias=lambda layer, ahead: np.zeros((1, 1, 1, 1)))


def split_and_merge(name: str) -> Change:
    """Splits and merges heads in the same wrong way."""
    return replace_steps(split_heads=SPLIT[name], merge_heads=MERGE[name])


def tile_kv_heads(layer: Layer, x: Array) -> Array:
    """Heads 0 1 0 1 … for query heads, in place of 0 0 … 1 1 …"""
    return np.tile(x, (1, layer.spec.num_heads // x.shape[1], 1, 1))


def share_with_first_head(layer: Layer, shared: Array, heads: int) -> Array:
    """The shared part of latent keys [b, n, r] in the first head, 0 in the others: [b, heads, n, r]."""
    return shared[:, None] * np.eye(heads, 1)[:, None]


def share_by_reshape(layer: Layer, shared: Array, heads: int) -> Array:
    """Repeats the shared part along a new axis of heads after that of the rows, and reshapes where it should transpose."""
    return np.repeat(shared[:, :, None], heads, axis=2).reshape(len(shared), heads, *shared.shape[1:])


def share_by_reshape_after_rope(layer: Layer, x: Array, name: str, positions: Array) -> Array:
    turned, latent = Layer.rotate(layer, x, name, positions), layer.spec.latent
    if name == "query" or latent is None:
        return turned
    shared, own = np.split(turned, [latent.rope_key_dim], axis=-1)
    return np.concatenate([share_by_reshape(layer, shared[:, 0], x.shape[1]), own], axis=-1)


def rotate_with_angles_of_other_pairs(layer: Layer, x: Array, name: str, positions: Array) -> Array:
    """RoPE of halves with angles f0 f0 f1 f1 …, which are those of neighbouring pairs; or of pairs with f0 f1 … f0 f1 …, of halves."""
    rope = layer.spec.rope
    if rope is None or rope.axes or layer.spec.differential:
        raise Impossible
    dims = rope.dims or x.shape[-1]
    of_pairs, turning = frequencies(rope, dims), x[..., :dims]
    angles = positions[:, None, :, None] * (np.tile(of_pairs, 2) if rope.interleaved else np.repeat(of_pairs, 2))
    if rope.interleaved:
        partners = np.stack((-turning[..., 1::2], turning[..., 0::2]), axis=-1).reshape(turning.shape)
    else:
        partners = np.concatenate((-turning[..., dims // 2 :], turning[..., : dims // 2]), axis=-1)
    turned = rope.attention_factor * (turning * np.cos(angles) + partners * np.sin(angles))
    return np.concatenate((turned, x[..., dims:]), axis=-1)


def exp_without_maximum(c: Computation) -> Computation:
    """Takes exp of the scores themselves, in the candidate's dtype."""

    def softmax(layer: Layer, scores: Array, sinks: Array | None) -> tuple[Array, Array]:
        exponentials = np.exp(scores.astype(BY_TORCH[c.dtype].numpy)).astype(np.float64)
        sink = 0.0 if sinks is None else np.exp(sinks[..., None])
        return exponentials / (exponentials.sum(axis=-1, keepdims=True) + sink), scores[..., 0]

    return replace_steps(softmax=softmax)(c)


def fill_blocked_with_zero(c: Computation) -> Computation:
    """Takes the softmax of scores that are 0 where they should be -inf."""
    right = c.layer.softmax
    return replace_steps(softmax=lambda layer, scores, sinks: right(layer, np.where(np.isneginf(scores), 0.0, scores), sinks))(c)


def block_after_softmax(c: Computation) -> Computation:
    """Sets the weights of blocked keys to 0."""
    right, visible = c.layer.softmax, c.case.visible[:, None]
    return UNMASK(replace_steps(softmax=lambda layer, scores, sinks: (right(layer, scores, sinks)[0] * visible, scores[..., 0]))(c))


def softmax_over_axis(axis: int) -> Change:
    """Takes the softmax over another axis."""

    def change(c: Computation) -> Computation:
        right = c.layer.softmax

        def softmax(layer: Layer, scores: Array, sinks: Array | None) -> tuple[Array, Array]:
            return np.moveaxis(right(layer, np.moveaxis(scores, axis, -1), None)[0], -1, axis), scores[..., 0]

        return replace_steps(softmax=softmax)(c)

    return change
