"""The stages of the computation, in their order: a method of each, which operators override, and what is known of it.

A layer asks its operators once, when it is made, which of them have a stage (`methods_of`); a stage that none has costs nothing. Q is
[b, h, q, head_dim], K [b, kv heads, k, head_dim], V [b, kv heads, k, value_head_dim], scores and weights are [b, h, rows, k], all keys of a
block of query rows.

    stage            takes                    returns                                            example
    project          inputs of a call         Q, K, V                                            latent
    norm             Q, K, V                  Q, K, V                                            qk_norm
    rotate           Q, K, V                  Q, K, V, by position                               rope
    rescale          Q, K, V                  Q, K, V, after that                                query_scale
    outputs          Q, K, V                  outputs that other layers do not have              latent
    rows_to_cache    Q, K, V                  more tensors of a cache                            forget_gate
    expand           rows of a cache          K, V                                               latent
    select           a call                   the call with a mask of fewer keys                 indexer
    terms            K                        terms of rows, added to q·k before the scale       relative_scores
    score            scores                   scores                                             softcap
    bias             rows of Q, some keys     numbers added to their scores                      alibi
    bias_of_visible  a call                   terms of rows, added to scores                     forget_gate
    shift            rows                     numbers added to all scores of a row               alibi
    normalise_input  scores, shift            scores, shift                                      scalable_softmax
    normalise        scores                   weights, in place of softmax                       sigmoid
    sinks            heads                    one more score of each row                         sinks
    factors          nothing                  the factor of each softmax in the weights          differential
    mix_weights      weights of all heads     weights of all heads                               talking_heads
    value            A V of all heads         A V                                                differential
    gate             inputs of a call         a factor on the outputs of heads                   output_gate

Of the ways to add to scores, `bias` is the one that fused kernels compute too, for any range of keys. `terms` are scaled and capped with
q·k. `bias_of_visible` may depend on which keys a query attends to, so it needs all of them. `shift` would round float32 scores if it were
added to them. `score` and `normalise_input` replace scores, before and after all of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from attend.attention.call import Call
    from attend.attention.masks import Masks

Projected = tuple["Tensor", ...]  # Q, K, V
Product = Callable[["Tensor", str], "Tensor"]  # x [..., in], name of a projection -> [..., out]


class Stage(NamedTuple):
    """What is known of a stage. None of it has a default, since a wrong one would be unsafe."""

    by: Literal["layer", "bias", "kernel"]  # computed by the layer around any kernel, by `Eager.bias`, or by kernels that declare it
    single: bool  # whether at most one operator of a layer has it
    all_keys: bool  # whether its results for some of the keys depend on the others, so that calls cannot be cut along their keys
    makes: tuple[str, ...]  # what operators with it are: attributes of `Operator`


# fmt: off
STAGES: dict[str, Stage] = {
    #                         by        single  all_keys makes
    "project":         Stage("layer",  True,  False, ()),
    "norm":            Stage("layer",  False, False, ()),
    "rotate":          Stage("layer",  False, False, ()),
    "rescale":         Stage("layer",  False, False, ()),
    "outputs":         Stage("layer",  False, False, ()),
    "rows_to_cache":   Stage("layer",  False, False, ()),
    "expand":          Stage("layer",  True,  False, ()),
    "select":          Stage("kernel", False, True,  ("same_keys_for_all_heads",)),
    "terms":           Stage("kernel", False, False, ()),
    "score":           Stage("kernel", False, False, ()),
    "bias":            Stage("bias",   False, False, ()),
    "bias_of_visible": Stage("kernel", False, True,  ()),
    "shift":           Stage("bias",   True,  False, ()),
    "normalise_input": Stage("kernel", False, True,  ()),
    "normalise":       Stage("kernel", True,  True,  ()),
    "sinks":           Stage("kernel", True,  False, ()),  # they are added once the parts of a call are merged
    "factors":         Stage("kernel", True,  True,  ("signed_weights",)),
    "mix_weights":     Stage("kernel", False, True,  ("signed_weights", "mixes_heads")),
    "value":           Stage("kernel", False, True,  ("scales_values",)),
    "gate":            Stage("layer",  False, False, ("scales_values",)),  # likewise
}
# fmt: on


class RowTerms(Protocol):
    """Terms of one call that are added to q·k, or to its scores."""

    def terms_of_rows(self, query: Tensor, rows: slice) -> Tensor:
        """The terms [b, h, rows, k] of these rows, whose queries are [b, h, rows, d]."""
        ...


class Stages:
    """A method of each stage."""

    def project(self, call: Call, product: Product) -> Projected:
        """Replaces the projection of query, key and value into heads."""
        raise NotImplementedError

    def norm(self, projected: Projected, call: Call) -> Projected:
        """Applied to projected heads, before `rotate`."""
        raise NotImplementedError

    def rotate(self, projected: Projected, call: Call) -> Projected:
        """Applied to heads, by position."""
        raise NotImplementedError

    def rescale(self, projected: Projected, call: Call) -> Projected:
        """Applied to heads, after `rotate`."""
        raise NotImplementedError

    def outputs(self, call: Call, projected: Projected, product: Product) -> dict[str, Tensor]:
        """Those of `own_outputs` that the call has, [b, …]."""
        raise NotImplementedError

    def rows_to_cache(self, call: Call, projected: Projected, product: Product) -> dict[str, Tensor]:
        """The tensors of `cached` for the keys of a call, [b, heads, k, width]. Calls to a cache have all its rows in `call.cached`."""
        raise NotImplementedError

    def expand(self, rows: Mapping[str, Tensor], product: Product) -> tuple[Tensor, Tensor]:
        """Keys and values [1, kv heads, n, …] of rows of a cache without them."""
        raise NotImplementedError

    def select(self, call: Call) -> Call:
        """The call with a mask of the keys that the layer selects."""
        raise NotImplementedError

    def terms(self, call: Call, key: Tensor) -> RowTerms | None:
        """Terms that are added to q·k, before the scale, of a call with keys [b, kv heads, k, d]."""
        raise NotImplementedError

    def score(self, scores: Tensor, call: Call) -> Tensor:
        """Applied to scaled scores [b, h, rows, k], before biases are added and keys masked."""
        raise NotImplementedError

    def bias(self, query: Tensor, call: Call, rows: slice, keys: slice) -> Tensor:
        """A bias on scores, [b|1, h, rows, keys], for query [b, h, rows, d]."""
        raise NotImplementedError

    def bias_of_visible(self, call: Call) -> RowTerms:
        """A bias on scores that depends on the keys that each query attends to, for the call's heads."""
        raise NotImplementedError

    def shift(self, masks: Masks, rows: slice, heads: Sequence[int] | None) -> Tensor | None:
        """A bias common to all keys of a row, float64 [b|1, heads, rows]; None: 0. Kept apart, since it would round float32 scores."""
        raise NotImplementedError

    def normalise_input(
        self, scores: Tensor, shift: Tensor | None, call: Call, rows: slice, visible: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Scores and shift as the normaliser needs them, before masked keys are set to -inf."""
        raise NotImplementedError

    def normalise(self, scores: Tensor) -> Tensor:
        """Replaces softmax: weights of scores [b, h, rows, k], which are -inf where a key is masked."""
        raise NotImplementedError

    def sinks(self, heads: Sequence[int] | None) -> Tensor:
        """Extra scores [heads, 1] of each row's softmax, that have no value."""
        raise NotImplementedError

    def factors(self) -> Sequence[float]:
        """The factor of each of its `num_softmaxes` in the weights; the first is 1."""
        raise NotImplementedError

    def mix_weights(self, weights: Tensor) -> Tensor:
        """Replaces the weights [b, h, rows, k] of all heads, which are 0 where a key is masked; there they are set to 0 again."""
        raise NotImplementedError

    def value(self, outputs: Tensor) -> Tensor:
        """Applied to the weighted values [b, h, q, value_head_dim]."""
        raise NotImplementedError

    def gate(self, call: Call, product: Product) -> Tensor:
        """The factor on head outputs, [b, h, q, value_head_dim|1]; depends on the query alone."""
        raise NotImplementedError


def stages_of(operator: type[Stages]) -> frozenset[str]:
    """The stages that an operator has."""
    return frozenset(name for name in STAGES if getattr(operator, name) is not getattr(Stages, name))


def methods_of(operators: Sequence[Stages], stage: str) -> list[Any]:
    """The methods of this stage of the operators that have it."""
    return [getattr(operator, stage) for operator in operators if getattr(type(operator), stage) is not getattr(Stages, stage)]


def select_heads(per_head: Tensor, heads: Sequence[int] | None, axis: int = 0) -> Tensor:
    """The selected heads of a tensor, which are on this axis; None: all."""
    return per_head if heads is None else per_head[(slice(None),) * axis + (list(heads),)]


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[b, n, heads * d] -> [b, heads, n, d]."""
    return x.view(*x.shape[:2], heads, x.shape[2] // heads).transpose(1, 2)
