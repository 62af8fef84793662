"""Rotary position embedding (Su et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from attend.attention.operators.declarations import Coordinates, Extent, LeftOut
from attend.attention.operators.operator import Operator
from attend.attention.operators.step import Step, Steps, Value
from attend.spec_parts import Axis, Finite, Flag, Part, Positive, Width, field_error

if TYPE_CHECKING:
    from collections.abc import Collection

    from attend.attention.operators.operator import Draw, Fields
    from attend.attention.operators.step import Arithmetic
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

    @classmethod
    def fill_in(cls, fields: Fields, width: int) -> None:
        """By default all of a head is rotated."""
        if isinstance(rope := fields.get(cls.field), Mapping) and rope.get("dims") is None:
            fields[cls.field] = {**rope, "dims": width}
        elif isinstance(rope, Rope) and rope.dims is None:
            fields[cls.field] = rope.model_copy(update={"dims": width})

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
        speed = " with frequencies" if rope.frequencies else f" theta {rope.theta:g}" + (f" {rope.scaling.type}" if rope.scaling else "")
        return f"{cls.field}{dims}{speed} on {'pairs' if rope.interleaved else 'halves'}"

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
        scaling = draw.one_of("none", "linear", "llama3", "own")
        if scaling == "own":
            rope |= {"frequencies": [0.0, *(draw.number(0, 2) for _ in range(dims // 2 - 1))], "attention_factor": 1.25}
        if scaling == "linear":
            rope["scaling"] = {"type": "linear", "factor": 2.5}
        if scaling == "llama3":
            rope["scaling"] = {"type": "llama3", "factor": 8.0, "original_max_position": draw.one_of(16, 64, 8192)}
        return rope

    @classmethod
    def steps(cls, spec: Dimensions, features: Collection[str] = ()) -> Steps:
        """Queries and keys, by the call's coordinates; with several softmaxes, the part of each by itself.

        If all that is rotated of a key is the part that heads share (`latent`), that part is rotated, before it is shared.
        """
        rope, softmaxes = getattr(spec, cls.field), spec.num_softmaxes
        shared = shares_rotary_key(spec) and "joined_keys" not in features
        width = spec.head_dim // softmaxes
        where = " of the first dims" if rope.dims and rope.dims < width and not shared else ""
        where += f" of each of {softmaxes} parts of a head" if softmaxes > 1 else " of each head" if where else ""
        how = f", {rope.scaling.type} scaling" if rope.scaling else ", frequencies of its own" if rope.frequencies else ""
        how += ", times attention_factor" if rope.attention_factor != 1 else ""
        how += f", by positions on {rope.num_axes} axes" if rope.num_axes > 1 else ""
        pairs = f"{'pairs' if rope.interleaved else 'halves'}{where}{how}"
        constant = Step(
            "frequencies",
            (),
            {"frequencies": Value("dims / 2", "float64")},
            "",
            lambda m: m.constant(frequencies(rope, rope.dims or width)),
        )
        compute = partial(_rotate_heads, rope=rope, count=softmaxes)
        query = Step(
            "rotate_query",
            ("query_projection", "query_coordinates", "frequencies"),
            {"query_projection": Value("b,h,q,head_dim")},
            f"Q_i = R(i) Q_i, on {pairs}",
            compute,
        )
        key, axes = ("rope_key", "b,k,rope_key_dim") if shared else ("key_projection", "b,kv heads,k,head_dim")
        formula = f"{'K^R' if shared else 'K'}_j = R(j) {'K^R' if shared else 'K'}_j, on {pairs}"
        reads = (key, "key_coordinates", "frequencies")
        return {"constants": (constant,), "rotate": (query, Step("rotate_key", reads, {key: Value(axes)}, formula, compute))}


def shares_rotary_key(spec: Dimensions) -> bool:
    """Whether keys have a part that all heads share, and nothing after it is rotated or normalised."""
    latent, rope = getattr(spec, "latent", None), getattr(spec, "rope", None)
    return latent is not None and not getattr(spec, "qk_norm", None) and not (rope and (rope.dims or 0) > latent.rope_key_dim)


def _rotate_heads(m: Arithmetic, x: Any, positions: Any, frequencies: Any, *, rope: Rope, count: int) -> Any:
    """Heads [b, heads, n, d], each of `count` equal ranges of their numbers by itself, or what all heads share, [b, n, d]."""
    if x.ndim == 3:
        return rotate(m, x[:, None], positions, frequencies, rope=rope)[:, 0]
    width = x.shape[-1] // count
    rotated = [rotate(m, x[..., i * width : (i + 1) * width], positions, frequencies, rope=rope) for i in range(count)]
    return rotated[0] if count == 1 else m.xp.concatenate(rotated, axis=-1)


def rotate(m: Arithmetic, x: Any, positions: Any, frequencies: Any, *, rope: Rope) -> Any:
    """Rotate pairs of the first `dims` numbers of x [b, heads, n, head_dim] by positions (Su et al. 2021, equation 34).

    Positions are [b|1, n], or [b|1, n, axes]: then each pair is rotated by the position on its axis (Wang et al. 2024, section 2.1).
    `frequencies` [dims/2] are from the function of that name. Pairs are also lengthened by `attention_factor` (Peng et al. 2023).

    Half-split pairs are (i, i + dims/2), as in GPT-NeoX and Llama; interleaved ones (2i, 2i + 1), as in GPT-J. Angles are computed in
    float64: the rounding of a float32 angle grows with the position (4e-5 of a pair's length at position 6,000).
    """
    dims = rope.dims or x.shape[-1]
    of_pairs = positions[..., None] if positions.ndim == 2 else positions[..., list(rope.axes or ())]
    angles = m.exact(of_pairs)[:, None] * frequencies  # [b|1, 1, n, dims/2]
    rotated, unrotated = m.widened(x[..., :dims]), x[..., dims:]
    cos, sin = (m.like(rope.attention_factor * wave, rotated) for wave in (m.xp.cos(angles), m.xp.sin(angles)))
    if rope.interleaved:
        even, odd = rotated[..., 0::2], rotated[..., 1::2]
        pairs = m.xp.stack((even * cos - odd * sin, odd * cos + even * sin), axis=-1)
        rotated = pairs.reshape(*x.shape[:-1], dims)
    else:
        first, second = rotated[..., : dims // 2], rotated[..., dims // 2 :]
        rotated = m.xp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    rotated = m.like(rotated, x)
    return m.xp.concatenate((rotated, unrotated), axis=-1) if unrotated.shape[-1] else rotated


def frequencies(rope: Rope, dims: int) -> list[float]:
    """theta^(-2i/dims) for i < dims/2, in radians per position, scaled for long contexts.

    "linear" divides every frequency by `factor`. "llama3" does so for frequencies of less than low_freq_factor turns within the training
    context, keeps those of more than high_freq_factor turns, and interpolates in between. `rope.frequencies` replaces all of this.
    """
    if rope.frequencies is not None:
        return list(rope.frequencies)
    plain, scaling = [rope.theta ** (-2 * i / dims) for i in range(dims // 2)], rope.scaling
    if scaling is None:
        return plain
    if scaling.type == "linear":
        return [frequency / scaling.factor for frequency in plain]
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = [scaling.original_max_position * frequency / (2 * math.pi) for frequency in plain]
    kept = [min(max((n - low) / (high - low), 0.0), 1.0) for n in turns]
    return [share * frequency + (1 - share) * frequency / scaling.factor for share, frequency in zip(kept, plain, strict=True)]
