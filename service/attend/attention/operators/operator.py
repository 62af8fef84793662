"""`Operator`: all that is particular to one operator of attention, with neutral defaults.

A class describes the operator for any spec: whether a layer has it, what it conflicts with, its weights, and the steps that it
has in the layer's program (`step.py`, `attention/program.py`). It has no instances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from attend.attention.operators.declarations import Interval

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from attend.attention.masks import Masks
    from attend.attention.operators.declarations import Axes, Coordinates, Extent, LeftOut, Shapes, Variances
    from attend.attention.operators.step import Step, Steps
    from attend.spec_parts import Dimensions
    from attend.tensors import Array

Fields = dict[str, Any]  # of a spec
Misfit = Callable[[str, str], Exception]  # canonical name of a weight, what is expected of it -> the error


class Draw(Protocol):
    """Draws plain Python values for random cases."""

    def flag(self, probability: float = 0.5) -> bool: ...
    def one_of(self, *options: Any) -> Any: ...
    def integer(self, low: int, high: int) -> int: ...
    def number(self, low: float, high: float) -> float: ...


class Operator:
    """An operator.

    A weight `….weight` is a matrix [out, in], or that of a norm. Weights that are neither given nor drawn are 1 in norms and 0 elsewhere.
    An operator that enlarges scores declares by how much, in `variances` or `score_growth`, or that it `amplifies_rounding`.
    """

    name: ClassVar[str]  # of its file
    field: ClassVar[str]  # of LayerSpec
    of_calls: ClassVar[bool] = False  # whether calls may ask for it, whatever the layer has
    positional: ClassVar[bool] = False  # whether results depend on the positions of queries and keys
    num_softmaxes: ClassVar[int] = 1
    per_head: ClassVar[bool] = False  # whether heads differ by more than their projections
    normalises_heads: ClassVar[bool] = False  # whether queries and keys do not grow with their inputs
    amplifies_rounding: ClassVar[bool] = False  # whether it may amplify it without bound, so that calls run alone and not in batches
    undefined_options: ClassVar[Mapping[str, str]] = {}  # field of a request that is refused -> why
    axes: ClassVar[Axes] = {}  # canonical name of each weight that it may have -> its axes
    identifying_weight: ClassVar[str] = ""  # one that layers have with it alone; "": no tensor shows that they have it
    zeros_without_weights: ClassVar[bool] = False  # whether some frameworks compute it with weights of 0, and save no tensor of them
    matrices: ClassVar[tuple[str, ...]] = ()  # projections that `init` draws, in this order
    needs_projections: ClassVar[bool] = False  # whether its weights are applied to inputs, which then must not be projected already
    same_keys_for_all_heads: ClassVar[bool] = False  # whether masks and biases of several heads are refused
    conflicts: ClassVar[Mapping[str, str]] = {}  # field of another operator that a spec with this one cannot have -> why
    survives_conflicts: ClassVar[bool] = False  # whether random cases drop what it conflicts with, and not this one
    case_features: ClassVar[tuple[str, ...]] = ()  # features of random cases that only layers with it have
    equal_inputs: ClassVar[bool] = False  # whether keys and values have one width
    even_widths: ClassVar[tuple[str, ...]] = ()  # d_model or head_dim, which random cases make even for it
    left_out: ClassVar[LeftOut | None] = None  # the mistake of someone who forgets it

    @classmethod
    def is_active(cls, spec: Dimensions) -> bool:
        """Whether a layer has this operator."""
        return bool(getattr(spec, cls.field))

    @classmethod
    def fill_in(cls, fields: Fields, width: int) -> None:
        """Set the fields of a new spec that follow from its own field. `width` is that of queries and keys of one softmax."""

    @classmethod
    def check(cls, spec: Dimensions) -> None:
        """Refuse a spec with this operator in which other fields do not fit it."""

    @classmethod
    def weights(cls, spec: Dimensions) -> Shapes:
        """Canonical name -> shape of its weights."""
        return {}

    @classmethod
    def infer_fields(cls, weights: Mapping[str, Array], num_heads: int, misfit: Misfit) -> Fields:
        """The fields of a spec that its weights determine, of a layer with `identifying_weight`. Raises `misfit` for a wrong shape."""
        return {}

    @classmethod
    def shared_key_dim(cls, value: Mapping[str, Any]) -> int:
        """How many numbers of each key all heads share by this value of its field, so that `key.weight` does not make them."""
        return 0

    @classmethod
    def steps(cls, spec: Dimensions, features: Collection[str] = ()) -> Steps:
        """Its steps in the program of calls with these features, by their place in `program_of`."""
        return {}

    @classmethod
    def implied_features(cls, spec: Dimensions, num_keys: int) -> frozenset[str]:
        """Features of calls with so many keys that follow from its field, which spare them some of its steps."""
        return frozenset()

    @classmethod
    def summary(cls, spec: Dimensions) -> str:
        """Its field in a few words, for tables of layers: `sinks`, `softcap 50`, `sigmoid`."""
        value = getattr(spec, cls.field)
        if isinstance(value, str):
            return value
        return cls.field if value is True or not isinstance(value, int | float) else f"{cls.field} {value:g}"

    @classmethod
    def own_steps(cls, spec: Dimensions) -> tuple[Step, ...]:
        """Its steps, wherever they are."""
        return tuple(step for steps in cls.steps(spec).values() for step in steps)

    @classmethod
    def writes(cls, spec: Dimensions, value: str) -> bool:
        """Whether one of its steps writes this value."""
        return any(value in step.writes for step in cls.own_steps(spec))

    @classmethod
    def is_relative(cls, spec: Dimensions) -> bool:
        """Whether results depend on differences of positions only."""
        return True

    @classmethod
    def interval(cls, spec: Dimensions) -> Interval:
        """The keys that it leaves to each query. The call's masks have it, and no step computes it."""
        return Interval()

    @classmethod
    def extent(cls, spec: Dimensions) -> Extent | None:
        """The positions that queries and keys may have; None: any."""
        return None

    @classmethod
    def coordinates(cls, spec: Dimensions) -> Coordinates | None:
        """What it uses of the field `positions` of calls; None: nothing."""
        return None

    @classmethod
    def widest(cls, spec: Dimensions) -> int:
        """The largest width that it adds to the layer."""
        return 1

    @classmethod
    def variances(cls, spec: Dimensions, weights: Mapping[str, Tensor], before: Variances) -> Variances:
        """Those of queries and keys that have the same scores as with the operator."""
        return before

    @classmethod
    def score_growth(cls, spec: Dimensions, masks: Masks) -> float:
        """The largest factor by which scores of a call with these masks grow."""
        return 1.0

    @classmethod
    def initial_weights(cls, spec: Dimensions) -> Mapping[str, Array]:
        """Values of weights that `init` does not draw, other than 1 for weights of norms and 0 for the rest."""
        return {}

    @classmethod
    def random(cls, draw: Draw, fields: Fields) -> Any:
        """A random value of its field, for a spec with these fields and all widths.

        They include `drawn`, the features of the case, and `num_softmaxes`.
        """
        return True

    @classmethod
    def random_weight(cls, name: str, normal: Array) -> Array:
        """A random value of one of its weights that is no matrix and no weight of a norm, from normal variates of its shape."""
        return normal
