"""How a trial is put to a target: arrays in its own framework, layout and mask convention; what it answers, back in ours.

It judges nothing and makes nothing. What the target raises becomes a `CallFailed` that says with what it was called, since a mask of
another shape or kind than it expects is the usual cause.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from service.attention.compare.cases import CheckCase, Frame
from service.attention.compare.convention import Convention, Polarity
from service.attention.reference.forward import merge_heads, split_heads
from service.tensors import Array


class CallFailed(Exception):
    """The target raised; the message says what, and with what it was called."""


@dataclass(frozen=True, slots=True)
class Answer:
    output: Array  # [b, q, d_model], or whatever came in its place
    attention_weights: Array | None  # [b, h, q, k], or whatever came in its place
    dtype: str


@dataclass(frozen=True, slots=True)
class Caller:
    """A target and how it is called. `splits`: its query, key and value come projected and split into heads."""

    function: Callable[..., Any]
    signature: inspect.Signature
    roles: dict[str, str]
    polarities: dict[str, Polarity]  # of the roles mask and padding, where it has them
    convention: Convention
    framework: str
    dtype: str
    device: Any = None
    batch_first: bool = True
    heads: int = 1
    splits: bool = False
    matrices: Mapping[str, Array] = field(default_factory=dict)  # canonical weights, for a function that takes them

    @property
    def frame(self) -> Frame:
        per_item = self.convention.mask_shape.startswith("b")
        return Frame(
            dtype=self.dtype,
            batched=self.convention.batched,
            causal=self.convention.causal,
            one_source="value" not in self.roles,
            per_item_mask=per_item,
            per_item_padding=per_item or bool(self.roles.keys() & {"padding", "lengths"}),
        )

    def refusal(self, case: CheckCase) -> str | None:
        """Why this trial cannot be put to this target, None if it can."""
        if case.is_cross and "key" not in self.roles:
            return "it takes one input"
        if case.is_cross and self.convention.causal:
            return "causal with q != k, and where its queries stand is not told"
        if case.kind == "causal" and self.convention.causal:
            return "it is causal in every case"
        if case.kind != "plain" and self._teller(case) is None:
            wanted = {
                "mask": "a mask over queries and keys",
                "causal": "such a mask or is_causal",
                "padding": "a mask, key mask or lengths",
            }
            return f"no parameter is known as {wanted[case.kind]}; if there is one, pass arguments={{…}}"
        return None

    def ask(self, case: CheckCase) -> Answer:
        """Call the target. CallFailed: it raised. ValueError: its result is no array."""
        values = self._values(case)
        ordered = {name: values[name] for name in self.signature.parameters if name in values}
        bound = inspect.BoundArguments(self.signature, ordered)
        try:
            result = self.function(*bound.args, **bound.kwargs)
        except Exception as error:
            called = ", ".join(f"{name} {_described(value)}" for name, value in ordered.items())
            raise CallFailed(f"it raised {type(error).__name__}: {error}; called with {called}") from error
        parts = result if isinstance(result, tuple | list) else (result,)
        if not parts or not hasattr(parts[0], "dtype"):
            raise ValueError(f"expected an array or a tuple (output, weights), got {type(parts[0] if parts else result).__name__}")
        weights = parts[1] if len(parts) > 1 and hasattr(parts[1], "dtype") else None
        dtype = str(parts[0].dtype).removeprefix("torch.")
        return Answer(self._as_output(_plain(parts[0]), case), None if weights is None else self._as_weights(_plain(weights)), dtype)

    def _teller(self, case: CheckCase) -> str | None:
        """The role by which the target is told what a trial blocks."""
        over_pairs = self.convention.mask_shape != "b,k"
        roles = {"plain": [], "mask": ["mask"], "causal": ["mask", "causal"], "padding": ["padding", "lengths", "mask"]}[case.kind]
        for role in roles:
            if role in self.roles and (role != "mask" or over_pairs or case.kind == "padding"):
                return role
        return None

    def _values(self, case: CheckCase) -> dict[str, Any]:
        """Parameter -> argument."""
        values: dict[str, Any] = {}
        teller = self._teller(case)
        for role, name in self.roles.items():
            required = self.signature.parameters[name].default is inspect.Parameter.empty
            told = case.told if role == teller else np.ones_like(case.told)
            if role in ("query", "key", "value"):
                values[name] = self._tensor(self._laid_out(getattr(case, role)), self.dtype)
            elif role in ("mask", "padding"):
                if role == teller or required:
                    values[name] = self._mask(told, role)
            elif role == "lengths":
                if role == teller or required:
                    values[name] = self._tensor(self._unbatched(told[:, 0].sum(axis=-1)), "int64")
            elif role in self.matrices:
                values[name] = self._tensor(self._oriented(self.matrices[role]), self.dtype)
            elif role == "heads":
                values[name] = self.heads
            elif role == "causal":
                values[name] = role == teller
            else:
                values[name] = role == "weights_too"
        return values

    def _laid_out(self, x: Array) -> Array:
        """[b, n, width] as the target takes it."""
        if self.splits and self.convention.layout != "b,n,d":
            x = split_heads(x, self.heads)
            x = x if self.convention.layout == "b,h,n,d" else x.swapaxes(1, 2)
        elif self.convention.batched and not self.batch_first:
            x = x.swapaxes(0, 1)
        return self._unbatched(x)

    def _oriented(self, weight: Array) -> Array:
        return weight.T if self.convention.orientation == "in,out" else weight

    def _unbatched(self, x: Array) -> Array:
        return x if self.convention.batched else x[0]

    def _mask(self, told: Array, role: str) -> Any:
        """What may be attended [b, q, k], in the target's shape and meaning."""
        shape = "b,k" if role == "padding" else self.convention.mask_shape
        match shape:
            case "q,k":
                told = told[0]
            case "b,k":
                told = self._unbatched(told[:, 0])
            case "b,q,k":
                told = self._unbatched(told)
            case "b,1,q,k":
                told = self._unbatched(told[:, None])
            case _:
                told = self._unbatched(np.repeat(told[:, None], self.heads, axis=1))
        meaning = self.polarities[role]
        if meaning == "add":
            return self._tensor(np.where(told, 0.0, -np.inf), self.dtype)
        dtype = {"bool": "bool", "int": "int64", "float": self.dtype}[self.convention.mask_dtype]
        return self._tensor(told if meaning == "attend" else ~told, dtype)

    def _tensor(self, x: Array, dtype: str) -> Any:
        if self.framework == "numpy":
            return x.astype(dtype)
        import torch

        return torch.tensor(x, dtype=getattr(torch, dtype), device=self.device)

    def _as_output(self, x: Array, case: CheckCase) -> Array:
        x = x if self.convention.batched else x[None]
        if self.splits and x.ndim == 4:
            return merge_heads(x if self.convention.layout == "b,h,n,d" else x.swapaxes(1, 2))
        return x.swapaxes(0, 1) if not self.batch_first and self.convention.batched and x.ndim == 3 else x

    def _as_weights(self, x: Array) -> Array:
        x = x if self.convention.batched else x[None]
        return x[:, None] if self.convention.layout == "b,n,d" and x.ndim == 3 else x


def _plain(x: Any) -> Array:
    """A NumPy array of float64 that shares nothing with what came."""
    if "torch" in sys.modules and isinstance(x, sys.modules["torch"].Tensor):
        x = x.detach().cpu().double().numpy()
    return np.array(x, np.float64)


def _described(x: Any) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}" if hasattr(x, "dtype") else repr(x)
