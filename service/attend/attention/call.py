"""`Call`, the input of a layer: `CallOptions` and tensors; `Result`, its output; functions that select the requested attention weights.

The creator of a Call must ensure that its shapes fit the layer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from attend.attention.masks import MASK_TENSORS, Masks
from attend.attention.torch_arithmetic import top_k
from attend.axes import FEATURES

SCORED = frozenset({"scores", "attention_weights", "log_sum_exp"})
FROM_HEADS = frozenset({"head_outputs", "concatenated", "output"})  # outputs that follow from weighted values
TOP_K = frozenset({"keys", "values"})  # in place of attention weights, with `top_k`


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What a call computes, and its shapes. Its cost, its validity and the choice of kernels depend on these and on its masks alone.

    It has no tensors.

    In self-attention, query, key and value are one input.
    """

    items: int  # of the batch axis
    num_queries: int
    num_keys: int  # those of a cache included
    outputs: frozenset[str]  # values of the program, and gradients
    scale: float
    softcap: float | None = None
    self_attention: bool = False
    keys_as_values: bool = False  # whether key and value are one input
    fully_masked: Literal["zero", "uniform", "error"] = "zero"
    dropout: tuple[float, int] | None = None  # p, seed
    heads: tuple[int, ...] | None = None  # selected attention weights; None: all
    queries: tuple[int, ...] | None = None
    average: bool = False
    top_k: int | None = None
    reproducible: bool = False
    is_part: bool = False  # whether it is one of several calls with some of the keys each

    @property
    def features(self) -> frozenset[str]:
        """What the options add to the program of a call (`Call.features`)."""
        present = {
            "softcap": self.softcap,
            "dropout": self.dropout is not None,
            "uniform": self.fully_masked == "uniform",
            "part": self.is_part,
            "values": not self.keys_as_values,
        }
        return frozenset([name for name, value in present.items() if value])

    @property
    def selects(self) -> bool:
        """Whether only some heads or queries of the attention weights are requested."""
        return self.heads is not None or self.queries is not None

    def inputs(self, make: Callable[[str], Tensor]) -> dict[str, Any]:
        """Query, key and value, each made of its name; those that are one input are made once."""
        query = make("query")
        key = query if self.self_attention else make("key")
        return {"query": query, "key": key, "value": key if self.keys_as_values else make("value")}


@dataclass(frozen=True, slots=True)
class Call:
    """One call to a layer: its options, and its tensors in the layer's dtype. `key` has no keys of a cache, which are in `cached`."""

    options: CallOptions
    query: Tensor  # [b, q, query_dim]
    key: Tensor  # [b, k, key_dim]; in self-attention the query
    value: Tensor  # [b, k, value_dim]
    masks: Masks
    optional_inputs: Mapping[str, Tensor] = field(default_factory=dict)  # its other tensors, as the rows of CALL_TENSORS say
    cached: Mapping[str, Tensor] | None = None  # values of the program that a cache keeps, of all its rows

    def with_options(self, **changes: Any) -> "Call":
        """The call with other options."""
        return replace(self, options=replace(self.options, **changes))

    @property
    def coordinates(self) -> tuple[Tensor, Tensor]:
        """Those of queries [b|1, q] and of keys [b|1, k], or [..., axes], by which RoPE rotates them."""
        queries, keys = self.optional_inputs.get("query_coordinates"), self.optional_inputs.get("key_coordinates")
        indices = torch.arange(self.key.shape[1], device=self.key.device)[None] if keys is None else keys
        return self.masks.positions if queries is None else queries, indices

    @property
    def features(self) -> frozenset[str]:
        """What `program_of` needs to know of the call: what it asks for beside softmax(scale · Q Kᵀ) V."""
        masks = self.masks
        present = {
            "causal": masks.only_causal,
            "sets": masks.has_sets,
            "intervals": masks.has_intervals and not masks.has_sets and not masks.only_causal,
            "bias": masks.bias is not None,
        }
        tensors = [name for name, tensor in FEATURES.items() if tensor in self.optional_inputs]
        return self.options.features.union([name for name, value in present.items() if value], tensors)

    def without_padding(self) -> "Call":
        """The call without the last keys, if equal lengths mask them for all queries and nothing else depends on them; else the same."""
        keys = self.masks.shared_keys()
        if keys is None or self.cached is not None or self.features - {"intervals", "softcap", "head_scale", "other_heads", "values"}:
            return self
        optional_inputs = {name: tensor[:, keys] if name == "key_coordinates" else tensor for name, tensor in self.optional_inputs.items()}
        key, value = self.key[:, keys], self.value[:, keys]
        masks = self.masks._replace(num_keys=keys.stop, lengths=None)
        short = replace(self, key=key, value=key if self.options.keys_as_values else value, optional_inputs=optional_inputs, masks=masks)
        return short.with_options(num_keys=keys.stop, self_attention=False)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the call."""
        every = (
            *(self.query, self.key, self.value, *self.optional_inputs.values()),
            *(getattr(self.masks, name) for name in MASK_TENSORS),
        )
        return (tensor for tensor in every if tensor is not None)

    def to(self, device: torch.device) -> "Call":
        """The call with its tensors on `device`; the same object if they already are."""
        if self.query.device == device:
            return self
        inputs = self.options.inputs(lambda name: getattr(self, name).to(device))
        moved = {name: tensor.to(device) for name in MASK_TENSORS if (tensor := getattr(self.masks, name)) is not None}
        optional_inputs = {name: tensor.to(device) for name, tensor in self.optional_inputs.items()}
        return replace(self, **inputs, masks=self.masks._replace(**moved), optional_inputs=optional_inputs)


@dataclass(frozen=True, slots=True)
class Result:
    """`tensors` maps the names in `CallOptions.outputs` to tensors; with `top_k`, `keys` and `values` replace `attention_weights`.

    `fully_masked`, bool [b, h, q], marks the rows without a key to attend to; None if there are none.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    fully_masked: Tensor | None = None

    @property
    def fully_masked_rows(self) -> int:
        return 0 if self.fully_masked is None else int(self.fully_masked.sum())

    def first_fully_masked(self, n: int = 4) -> list[tuple[int, int, int]]:
        """(batch, head, query) of the first few fully masked rows."""
        return [] if self.fully_masked is None else [(b, h, i) for b, h, i in self.fully_masked.nonzero()[:n].tolist()]

    def cpu(self) -> "Result":
        """The result with tensors on the CPU; the same object if they already are."""
        if all(tensor.device.type == "cpu" for tensor in self.tensors.values()):
            return self
        fully_masked = None if self.fully_masked is None else self.fully_masked.cpu()
        return Result({name: tensor.cpu() for name, tensor in self.tensors.items()}, fully_masked)

    def split(self, sizes: Sequence[int]) -> "list[Result]":
        """The results of consecutive batch items, `sizes` of them each. Tensors are views."""
        if len(sizes) == 1:
            return [self]
        items = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        masked = self.fully_masked
        results = []
        for i in items:
            tensors = {name: tensor[i] for name, tensor in self.tensors.items()}
            results.append(Result(tensors, None if masked is None else masked[i]))
        return results


class WeightBlock(NamedTuple):
    """The attention weights of a block of query rows."""

    rows: slice
    weights: Tensor  # [b, h, rows, k]
    visible: Tensor | None  # bool [b|1, h|1, rows|1, k|1]: the keys that each query may attend to; None: all


def selected_weights(weights: Tensor, call: Call) -> dict[str, Tensor]:
    """What `reduce_weights` returns of the selected heads and queries, from all weights [b, h, q, k]."""
    options = call.options
    if options.heads is None and options.queries is None and options.top_k is None and not options.average:
        return {"attention_weights": weights}
    for axis, indices in ((1, options.heads), (2, options.queries)):
        if indices is not None:
            weights = weights.index_select(axis, torch.tensor(indices, device=weights.device))
    return reduce_weights(weights, call)


def reduce_weights(weights: Tensor, call: Call) -> dict[str, Tensor]:
    """`attention_weights`, averaged over heads if requested; with `top_k`, the largest `values` of each row and their `keys`."""
    if call.options.average:
        weights = weights.mean(1)
    if call.options.top_k is None:
        return {"attention_weights": weights}
    values, keys = top_k(weights, min(call.options.top_k, weights.shape[-1]))
    return {"values": values, "keys": keys}
