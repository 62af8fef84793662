"""What a layer computes from, and what it returns. The shapes of a Call fit its layer: nothing here checks them."""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from service.attention.masks import Masks

FullyMasked = Literal["zero", "uniform", "error"]
WeightBlock = tuple[slice, Tensor, Tensor | None]  # query rows, weights [b, h, rows, k], visible bool [b|1, h|1, rows|1, k|1]


@dataclass(frozen=True, slots=True)
class Call:
    """Tensors are on the layer's device and in its dtype. Self-attention has `key is query`, and `value is key` where value is the key."""

    query: Tensor  # [b, q, query_dim]
    key: Tensor  # [b, k, key_dim]
    value: Tensor  # [b, k, value_dim]
    masks: Masks
    scale: float
    outputs: frozenset[str]
    softcap: float | None = None
    fully_masked: FullyMasked = "zero"
    head_scale: Tensor | None = None  # [b|1, h, 1, 1]
    dropout: tuple[float, int] | None = None  # p, seed
    heads: tuple[int, ...] | None = None  # the selection of attention weights ...
    queries: tuple[int, ...] | None = None
    average: bool = False
    top_k: int | None = None
    reproducible: bool = False
    part: bool = False  # of a call cut along its keys; its log_sum_exp, by which parts are combined, is float64
    output_gradient: Tensor | None = None  # [b, q, output_dim], where gradients are among the outputs

    @property
    def selects(self) -> bool:
        """Whether only some heads or queries of the attention weights are wanted."""
        return self.heads is not None or self.queries is not None

    def to(self, device: torch.device) -> "Call":
        """The call with its tensors on `device`; itself where they are there."""
        if self.query.device == device:
            return self
        query = self.query.to(device)
        key = query if self.key is self.query else self.key.to(device)
        value = key if self.value is self.key else self.value.to(device)
        moved = {
            name: tensor.to(device)
            for name in ("positions", "attend_mask", "attend_keys", "lengths", "bias")
            if (tensor := getattr(self.masks, name)) is not None
        }
        others = {name: tensor.to(device) for name in ("head_scale", "output_gradient") if (tensor := getattr(self, name)) is not None}
        return replace(self, query=query, key=key, value=value, masks=replace(self.masks, **moved), **others)


@dataclass(frozen=True, slots=True)
class Result:
    """`tensors` holds what `Call.outputs` named; the weights as `attention_weights`, or as `keys` and `values` under `top_k`.

    `fully_masked`, bool [batch, heads, queries], marks the rows without a key to attend to; None where there are none.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    fully_masked: Tensor | None = None

    @property
    def fully_masked_rows(self) -> int:
        return 0 if self.fully_masked is None else int(self.fully_masked.sum())

    def first_fully_masked(self, n: int = 4) -> list[tuple[int, int, int]]:
        """(batch, head, query) of the first few fully masked rows."""
        return [] if self.fully_masked is None else [(b, h, i) for b, h, i in self.fully_masked.nonzero()[:n].tolist()]
