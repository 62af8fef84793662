"""Rotary position embedding (Su et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from attend.attention.operators.declarations import Coordinates, Extent, LeftOut
from attend.attention.operators.lazy import torch
from attend.attention.operators.operator import Operator
from attend.spec_parts import Axis, Finite, Flag, Part, Positive, Width, field_error

if TYPE_CHECKING:
    from torch import Tensor

    from attend.attention.call import Call
    from attend.attention.operators.operator import Draw, Fields, Layer
    from attend.attention.operators.stages import Projected
    from attend.spec_parts import Dimensions


class RopeScaling(Part):
    """Scaling of RoPE's frequencies for long contexts: all divided by `factor` (linear), or only low frequencies (llama3)."""

    type: Literal["linear", "llama3"] = Field(examples=["linear"])
    factor: Positive = Field(examples=[8.0])
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_position: Width = 8192

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise field_error("/low_freq_factor", f"less than high_freq_factor {self.high_freq_factor}", str(self.low_freq_factor))
        return self


class Rope(Part):
    """Rotary position embedding (Su et al. 2021) of the first `dims` of each head: halves (GPT-NeoX, Llama) or interleaved pairs."""

    theta: Positive = Field(default=10000.0, examples=[10000.0])
    dims: Width | None = Field(default=None, description="Number of dimensions of each head that are rotated, even; head_dim if left out.")
    interleaved: Flag = False
    scaling: RopeScaling | None = None
    frequencies: tuple[Finite, ...] | None = Field(
        default=None, description="Radians per position of each pair, dims/2 numbers, in place of theta and scaling (yarn, longrope)."
    )
    attention_factor: Positive = Field(default=1.0, description="Factor on cosines and sines (yarn, longrope).")
    max_length: Width | None = Field(
        default=None, description="Longer calls are refused, since the model has other frequencies there (longrope, dynamic)."
    )
    axes: tuple[Axis, ...] | None = Field(
        default=None,
        description="Axis of the positions that each pair turns by, dims/2 numbers (m-RoPE, images); null if there is one axis.",
    )
    requires_positions: Flag = Field(
        default=False,
        description="Whether calls must have `positions` (images); otherwise they are the indices of the rows, on every axis.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.frequencies is not None and self.scaling is not None:
            raise field_error("/scaling", "null, since frequencies are given", self.scaling.type)
        for name, numbers in (("frequencies", self.frequencies), ("axes", self.axes)):
            if numbers is not None and self.dims is not None and len(numbers) * 2 != self.dims:
                raise field_error(f"/{name}", f"{self.dims // 2} numbers, half of dims {self.dims}", str(len(numbers)))
        if unused := {*range(self.num_axes)} - {*(self.axes or (0,))}:
            raise field_error("/axes", f"each axis from 0 to {self.num_axes - 1}", f"no pair with axis {min(unused)}")
        return self

    @property
    def num_axes(self) -> int:
        """Number of coordinates of a position."""
        return 1 + max(self.axes, default=0) if self.axes is not None else 1


class RopeOperator(Operator):
    name, field, positional = "rope", "rope", True
    left_out = LeftOut("RoPE", "q_i · k_j", "R(i) q_i · R(j) k_j, R(i): the rotation at position i")
    case_features, even_widths = ("axes", "positions"), ("head_dim",)
    newer_fields = ("frequencies", "attention_factor", "max_length", "axes", "requires_positions")

    @classmethod
    def fill_in(cls, fields: Fields, width: int) -> None:
        """By default all of a head is rotated."""
        if isinstance(rope := fields.get(cls.field), Mapping) and rope.get("dims") is None:
            fields[cls.field] = {**rope, "dims": width}

    @classmethod
    def check(cls, spec: Dimensions) -> None:
        rope: Rope = getattr(spec, cls.field)
        width = spec.head_dim // spec.num_softmaxes
        if (dims := rope.dims or width) > width or dims % 2:
            most = f"head_dim {width}" if spec.num_softmaxes == 1 else f"{width}, half of head_dim"
            raise field_error("/rope/dims", f"an even number of at most {most}", str(dims))

    @classmethod
    def summary(cls, spec: Dimensions) -> str:
        """`rope theta 10000 on pairs`, `rope of 16 dims with frequencies on halves`"""
        rope: Rope = getattr(spec, cls.field)
        dims = f" of {rope.dims} dims" if rope.dims != spec.head_dim // spec.num_softmaxes else ""
        kind = " with frequencies" if rope.frequencies else f" theta {rope.theta:g}" + (f" {rope.scaling.type}" if rope.scaling else "")
        return f"{cls.field}{dims}{kind} on {'pairs' if rope.interleaved else 'halves'}"

    @classmethod
    def formula(cls, spec: Dimensions) -> dict[str, str]:
        rope, latent, parts = getattr(spec, cls.field), getattr(spec, "latent", None), spec.num_softmaxes
        where = " of the part of K that heads share"
        if latent is None or rope.dims != latent.rope_key_dim:
            where = " of the first dims" if rope.dims and rope.dims < spec.head_dim // parts else ""
            where += f" of each of {parts} parts of a head" if parts > 1 else " of each head" if where else ""
        own = f", {rope.scaling.type} scaling" if rope.scaling else ", frequencies of its own" if rope.frequencies else ""
        own += ", times attention_factor" if rope.attention_factor != 1 else ""
        own += f", by positions on {rope.num_axes} axes" if rope.num_axes > 1 else ""
        return {"rotate": f"Q = RoPE(Q),  K = RoPE(K), on {'pairs' if rope.interleaved else 'halves'}{where}{own}"}

    @classmethod
    def extent(cls, spec: Dimensions) -> Extent | None:
        stop = getattr(spec, cls.field).max_length
        return None if stop is None else Extent(stop, "beyond which this model rotates by other frequencies")

    @classmethod
    def coordinates(cls, spec: Dimensions) -> Coordinates:
        rope: Rope = getattr(spec, cls.field)
        return Coordinates(rope.num_axes, rope.requires_positions, cls.extent(spec))

    @classmethod
    def random(cls, draw: Draw, fields: Fields) -> Any:
        """`dims` may be omitted if equal to head_dim. Short training contexts let llama3 scale some frequencies only."""
        head_dim = fields.get("head_dim", fields["d_model"] // fields["num_heads"]) // fields["num_softmaxes"]
        dims = draw.one_of(*range(2, head_dim + 1, 2))
        rope: dict[str, Any] = {"theta": draw.one_of(10.0, 10000.0, 500000.0), "interleaved": draw.flag()}
        if dims < head_dim or draw.flag():
            rope["dims"] = dims
        if "axes" in fields["drawn"]:
            axes = [draw.integer(0, 3) for _ in range(dims // 2)]
            rope["axes"] = [sorted(set(axes)).index(axis) for axis in axes]  # numbered without gaps
        kind = draw.one_of("none", "linear", "llama3", "own")
        if kind == "own":
            rope |= {"frequencies": [0.0, *(draw.number(0, 2) for _ in range(dims // 2 - 1))], "attention_factor": 1.25}
        if kind == "linear":
            rope["scaling"] = {"type": "linear", "factor": 2.5}
        if kind == "llama3":
            rope["scaling"] = {"type": "llama3", "factor": 8.0, "original_max_position": draw.one_of(16, 64, 8192)}
        return rope

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self.config: Rope = getattr(layer.spec, self.field)
        self.parts = layer.spec.num_softmaxes
        self.frequencies = frequencies(self.config, layer.spec.head_dim // self.parts).to(layer.device)

    def rotate(self, projected: Projected, call: Call) -> Projected:
        """Queries and keys, by the call's positions; with several softmaxes, the part of each by itself."""
        query, key, value = projected
        query_positions, key_positions = call.coordinates
        return self._rotate(query, query_positions), self._rotate(key, key_positions), value

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.parts == 1:
            return rotate(x, positions, self.config, self.frequencies)
        return torch.cat([rotate(part, positions, self.config, self.frequencies) for part in x.chunk(self.parts, -1)], -1)


def rotate(x: Tensor, positions: Tensor, rope: Rope, frequencies: Tensor) -> Tensor:
    """Rotate pairs of the first `dims` numbers of x [b, heads, n, head_dim] by positions (Su et al. 2021, equation 34).

    Positions are [b|1, n], or [b|1, n, axes]: then each pair is rotated by the position on its axis (Wang et al. 2024, section 2.1).
    `frequencies` [dims/2] are from the function of that name.

    Half-split pairs are (i, i + dims/2), as in GPT-NeoX and Llama; interleaved ones (2i, 2i + 1), as in GPT-J. Angles are computed in
    float64: the rounding of a float32 angle grows with the position (4e-5 of a pair's length at position 6,000). Cosines, sines and the
    products with x are then float32, or float64 if x is.
    """
    dims = rope.dims or x.shape[-1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    pair_positions = positions[..., None] if positions.ndim == 2 else positions[..., list(rope.axes or ())]
    angles = pair_positions.to(torch.float64)[:, None] * frequencies  # [b|1, 1, n, dims/2]
    rotated, rest = x[..., :dims].to(dtype), x[..., dims:]
    cos, sin = ((rope.attention_factor * wave).to(dtype) for wave in (angles.cos(), angles.sin()))
    if rope.interleaved:
        even, odd = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    else:
        first, second = rotated.chunk(2, -1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    rotated = rotated.to(x.dtype)
    return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """theta^(-2i/dims) for each pair, scaled as `rope.scaling` says, or `rope.frequencies`: float64 [dims/2]."""
    dims = rope.dims or head_dim
    if rope.frequencies is not None:
        return torch.tensor(rope.frequencies, dtype=torch.float64)
    exponents = torch.arange(0, dims, 2, dtype=torch.float64) / dims
    frequencies = 1.0 / torch.tensor(rope.theta, dtype=torch.float64) ** exponents
    if (scaling := rope.scaling) is not None:
        slowed = frequencies / scaling.factor
        if scaling.type == "linear":
            frequencies = slowed
        else:  # Llama 3: divides low frequencies by `factor`, keeps high ones, interpolates between
            waves = 2 * math.pi / frequencies
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            share = ((scaling.original_max_position / waves - low) / (high - low)).clamp(0, 1)
            frequencies = slowed * (1 - share) + frequencies * share
    return frequencies
