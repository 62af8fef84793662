"""The rotary embedding of a config: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4), as LayerSpec's `rope`.

Kinds that LayerSpec has no name for become frequencies and a factor: yarn (Peng et al. 2023, arXiv 2309.00071), longrope (Ding et al. 2024,
arXiv 2402.13753) and Gemma 4's proportional. Where frequencies depend on the length of a call (longrope, dynamic), those of short calls
are taken, and `max_length` refuses longer ones.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from attend.checkpoints.config import Config
from attend.checkpoints.layout import Fields
from attend.checkpoints.powers import powers
from attend.tensors import Array

LENGTH = "original_max_position_embeddings"
ROPE_TYPES: dict[str, tuple[str, ...]] = {  # rope_type -> its fields
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", LENGTH),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", LENGTH),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor", LENGTH),
    "proportional": ("factor",),
}
ALIASES = {"mrope": "default", "su": "longrope"}
EVERY_KIND = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")


@dataclass(frozen=True, slots=True)
class Rotary:
    """What a family's code says about its rotary embedding; the numbers are defaults for fields that a config leaves out."""

    theta: float | None = None  # if the config has none; None: required
    partial: float | None = None  # share of a head that is rotated where the config has none; None: always the whole head
    interleaved: bool = False
    interleaved_field: str = ""  # flag of the config that decides it, by default true
    negate_angles: bool = False  # rotates by the opposite angles
    theta_fields: Mapping[str, tuple[str, float]] = field(default_factory=dict)  # layer type -> its field in transformers 4, default
    scaled_layer_types: tuple[str, ...] | None = None  # layer types to which rope_scaling of transformers 4 applies; None: all
    fixed: bool = False  # theta is that of the code, whatever the config says
    dims_field: str = ""  # field with the number of rotated dims
    old_dims_field: str = ""  # the same, for configs that do not have the share of a head that is rotated
    sections: Literal["", "blocks", "thirds"] = ""  # which pairs mrope_section gives each axis: blocks (Qwen2-VL), every third (Qwen3-VL)
    image: Literal["", "blocks", "alternating"] = ""  # rows and columns of an image, whose frequencies are the same, or alternate (Pixtral)
    unit: float = 1.0  # radians that the fastest pair turns for a distance of 1 in an image
    trait_fields: tuple[str, ...] = ()  # fields of rope_parameters that are not about RoPE, and that a trait reads


def rope_fields(config: Config, rotary: Rotary, layer_type: str, head_dim: int) -> Fields:
    """LayerSpec's `rope`. Raises InvalidRequest for a kind or a field that is not understood.

    `rope_parameters` may have one entry for each layer type.
    """
    if rotary.fixed:
        dims = config.count(rotary.dims_field, most=head_dim) if rotary.dims_field else head_dim
        return {"theta": rotary.theta, "dims": dims, "interleaved": rotary.interleaved}
    settings = _settings(config, rotary, layer_type)
    if rotary.image:
        return image_fields(config, settings, rotary, head_dim)
    kind = settings.get("rope_type", "type", default="default")
    kind = ALIASES.get(kind, kind)
    if kind not in ROPE_TYPES:
        raise settings.refusal("rope_type", f"one of {', '.join(ROPE_TYPES)}", kind)
    _require_known_fields(settings, kind, (*EVERY_KIND, *ROPE_TYPES[kind], *rotary.trait_fields))
    partial = _rotated_share(config, settings, rotary, head_dim)
    if partial != 1 and rotary.partial is None and kind != "proportional":
        raise config.refusal("partial_rotary_factor", "1, since this family rotates whole heads", partial)
    theta_field, default = rotary.theta_fields.get(layer_type, ("rope_theta", rotary.theta or -1.0))
    theta = settings.number("rope_theta", default=config.number(theta_field, "rotary_emb_base", default=default))
    if theta <= 0:
        raise config.refusal("rope_theta", "a positive number", None)
    dims = int(head_dim * partial) if kind != "proportional" else head_dim
    dims = config.count(rotary.dims_field, most=head_dim) if rotary.dims_field else dims
    interleaved = config.flag(rotary.interleaved_field, default=True) if rotary.interleaved_field else rotary.interleaved
    if config.fields.get("rope_interleaved") is interleaved:
        config.ignore("rope_interleaved")
    rope: Fields = {"theta": theta, "dims": dims, "interleaved": interleaved}
    with np.errstate(all="ignore"):  # numbers that are not finite are refused with the spec
        unscaled = powers(theta, -np.arange(0, dims, 2) / dims)
        rope |= SCALINGS[kind](RopeInputs(config, settings, unscaled, theta, partial)) if kind in SCALINGS else {}
    if rotary.negate_angles:
        rope["frequencies"] = [-x for x in rope.get("frequencies", unscaled.tolist())]
    if rotary.sections and settings.get("mrope_section") is not None:
        rope["axes"] = section_axes(settings, rotary, dims // 2)
    return rope


def section_axes(settings: Config, rotary: Rotary, pairs: int) -> list[int]:
    """m-RoPE (Wang et al. 2024, section 2.1): the axis of each pair, time, height or width. Raises InvalidRequest."""
    sections = settings.integers("mrope_section")
    if sections is None or len(sections) != 3 or min(sections) < 0 or sum(sections) != pairs:
        raise settings.refusal("mrope_section", f"three numbers of pairs, {pairs} in all", settings.get("mrope_section"))
    if rotary.sections == "blocks":
        return [axis for axis, n in enumerate(sections) for _ in range(n)]
    axes = [0] * pairs
    for axis in (1, 2):
        axes[axis : sections[axis] * 3 : 3] = [axis] * len(axes[axis : sections[axis] * 3 : 3])
    return axes


def image_fields(config: Config, settings: Config, rotary: Rotary, head_dim: int) -> Fields:
    """RoPE of an image: half of the pairs turn by the row of a patch, the others by its column. Raises InvalidRequest."""
    settings.expect("rope_type", "axial")
    _require_known_fields(settings, "axial", ("rope_type", "rope_theta"))
    if head_dim % 4:
        raise config.refusal("head_dim", "a multiple of 4", head_dim)
    theta = settings.number("rope_theta", default=config.number("rope_theta", default=rotary.theta))
    if theta <= 0:
        raise config.refusal("rope_theta", "a positive number", theta)
    of_rows = np.arange(0, head_dim, 4) / head_dim
    exponents = np.concatenate([of_rows, of_rows + (2 / head_dim if rotary.image == "alternating" else 0)])
    frequencies, axes = rotary.unit * powers(theta, -exponents), [0] * len(of_rows) + [1] * len(of_rows)
    return {
        "dims": head_dim,
        "interleaved": rotary.interleaved,
        "frequencies": frequencies.tolist(),
        "axes": axes,
        "requires_positions": True,
    }


def _require_known_fields(settings: Config, kind: str, known: tuple[str, ...]) -> None:
    for name, value in settings.fields.items():
        if name not in known and value is not None:
            raise settings.refusal(name, f"only fields that rope_type {kind} has", value)


def _settings(config: Config, rotary: Rotary, layer_type: str) -> Config:
    """The settings of RoPE for this layer type, from `rope_parameters` or `rope_scaling`."""
    config.ignore("rope_theta", "rope_scaling", LENGTH, *(field for field, _ in rotary.theta_fields.values()))
    name, given = "rope_parameters", config.get("rope_parameters", default={})
    if given and config.get("rope_scaling") is not None:
        raise config.refusal("rope_scaling", "rope_parameters or rope_scaling", "both")
    if not given and (rotary.scaled_layer_types is None or layer_type in rotary.scaled_layer_types):
        name, given = "rope_scaling", config.get("rope_scaling", default={})
    if isinstance(given, Mapping) and any(isinstance(entry, Mapping) for entry in given.values()):
        given = given.get(layer_type)
    if not isinstance(given, Mapping):
        raise config.refusal(name, f"an object, or one for {layer_type}", given)
    return Config(given, f"{config.at}/{name}")


def _rotated_share(config: Config, settings: Config, rotary: Rotary, head_dim: int) -> float:
    """The share of a head that is rotated. Raises InvalidRequest unless it is from 0 to 1."""
    config.ignore("partial_rotary_factor", "rotary_pct")
    has_old = rotary.old_dims_field and config.get(rotary.old_dims_field) is not None
    old = config.count(rotary.old_dims_field, most=head_dim) / head_dim if has_old else None
    for source, name in ((settings, "partial_rotary_factor"), (config, "partial_rotary_factor"), (config, "rotary_pct")):
        if source.get(name) is not None:
            if not 0 <= (share := source.number(name)) <= 1:
                raise source.refusal(name, "a number from 0 to 1", share)
            return share
    return old if old is not None else 1.0 if rotary.partial is None else rotary.partial


@dataclass(frozen=True, slots=True)
class RopeInputs:
    """What a scaling of frequencies depends on."""

    config: Config
    settings: Config
    unscaled: Array  # frequencies [dims / 2]
    theta: float
    partial: float

    @property
    def trained_length(self) -> int:
        """The context length of training: a field of the config, else of the settings; of the settings if they differ by layer type."""
        has_entries = any(isinstance(entry, Mapping) for entry in dict(self.config.get("rope_parameters", default={})).values())
        return self.settings.count(LENGTH) if has_entries or self.config.get(LENGTH) is None else self.config.count(LENGTH)

    @property
    def factor(self) -> float:
        """How much longer the context is than that of training."""
        if self.settings.get("factor") is not None:
            return self.settings.number("factor")
        return self.config.count("max_position_embeddings") / self.trained_length


def linear(inputs: RopeInputs) -> Fields:
    return {"scaling": {"type": "linear", "factor": inputs.settings.number("factor")}}


def llama3(inputs: RopeInputs) -> Fields:
    numbers = {name: inputs.settings.number(name) for name in ROPE_TYPES["llama3"][:3]}
    return {"scaling": {"type": "llama3", **numbers, "original_max_position": inputs.trained_length}}


def dynamic(inputs: RopeInputs) -> Fields:
    """Unscaled up to max_position_embeddings; longer calls would have a larger theta."""
    inputs.settings.number("factor")
    return {"max_length": inputs.config.count("max_position_embeddings")}


def proportional(inputs: RopeInputs) -> Fields:
    """The first pairs have the frequencies of a head that is rotated as a whole; the others are not rotated."""
    turning = int(inputs.partial * (2 * len(inputs.unscaled)) // 2)
    frequencies = np.where(np.arange(len(inputs.unscaled)) < turning, inputs.unscaled, 0.0) / inputs.settings.number("factor", default=1.0)
    return {"frequencies": frequencies.tolist()}


def longrope(inputs: RopeInputs) -> Fields:
    """Each frequency is divided by its own short factor; `attention_factor` multiplies cosines and sines."""
    short, length, factor = inputs.settings.get("short_factor"), inputs.trained_length, inputs.factor
    if not isinstance(short, list) or len(short) != len(inputs.unscaled) or not all(isinstance(x, int | float) and x > 0 for x in short):
        raise inputs.settings.refusal("short_factor", f"{len(inputs.unscaled)} positive numbers", short)
    default = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    attention_factor = inputs.settings.number("attention_factor", default=default)
    return {"frequencies": (inputs.unscaled / short).tolist(), "attention_factor": attention_factor, "max_length": length}


def yarn(inputs: RopeInputs) -> Fields:
    """High frequencies stay, low ones are divided by the factor, with a ramp between; `attention_factor` multiplies cosines and sines."""
    settings, factor, dims = inputs.settings, inputs.factor, 2 * len(inputs.unscaled)

    def pair_of(turns: float) -> float:
        """The pair that turns so often within the context of training."""
        return dims * math.log(inputs.trained_length / (turns * 2 * math.pi)) / (2 * math.log(inputs.theta))

    low, high = pair_of(settings.get("beta_fast") or 32), pair_of(settings.get("beta_slow") or 1)
    if settings.flag("truncate", default=True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / (high - low or 0.001), 0, 1)
    frequencies = inputs.unscaled / factor * ramp + inputs.unscaled * (1 - ramp)
    mscale, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
    default = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor, 1)
    return {"frequencies": frequencies.tolist(), "attention_factor": settings.number("attention_factor", default=default)}


def score_mscale(config: Config, layer_type: str) -> float:
    """DeepSeek's factor on scores of longer contexts: the square of yarn's mscale, by `mscale_all_dim`; 1 without it."""
    settings = _settings(config, Rotary(), layer_type)
    if settings.get("rope_type", "type", default="default") == "default" or not settings.get("mscale_all_dim"):
        return 1.0
    return _mscale(settings.number("factor"), settings.number("mscale_all_dim")) ** 2


def _mscale(factor: float, multiplier: float) -> float:
    return 0.1 * multiplier * math.log(factor) + 1 if factor > 1 else 1.0


SCALINGS: dict[str, Callable[[RopeInputs], Fields]] = {
    "linear": linear,
    "dynamic": dynamic,
    "llama3": llama3,
    "yarn": yarn,
    "longrope": longrope,
    "proportional": proportional,
}
