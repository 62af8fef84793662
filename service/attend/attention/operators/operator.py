"""`Operator`: all that is particular to one operator of attention, with neutral defaults.

The class describes the operator for any spec: whether a layer has it, what it conflicts with, its weights, its cost. An instance computes
it for one layer; `Layer` is what it is made of. Each method from `project` on is a stage of the computation. A layer asks its operators
once, when it is made, which of them override a stage; a stage that none overrides costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from attend.spec_parts import Dimensions

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from attend.attention.call import Call, CallOptions
    from attend.attention.masks import Masks
    from attend.tensors import Array

Shapes = dict[str, tuple[int, ...]]
Axes = Mapping[str, tuple[str, ...]]  # canonical name of a weight -> what its axes are
Fields = dict[str, Any]  # of a spec
Misfit = Callable[[str, str], Exception]  # canonical name of a weight, what is expected of it -> the error
Projected = tuple["Tensor", ...]  # query [b, h, q, head_dim], key [b, kv heads, k, head_dim], value [b, kv heads, k, value_head_dim]
Product = Callable[["Tensor", str], "Tensor"]  # x [..., in], name of a projection -> [..., out]


class Cost(NamedTuple):
    """What an operator adds to the cost of one batch item."""

    multiplications: int = 0
    operations: int = 0
    elements: int = 0  # numbers in the layer's dtype
    wide_elements: int = 0  # numbers in float32 or better
    memory_bytes: int = 0


class CachedTensor(NamedTuple):
    """The shape of each row of a cached tensor, and its datatype."""

    heads: int
    width: int
    dtype: str = ""  # "": the layer's
    shared: bool = False  # whether all heads of the layer share it; it then has one head, and no axis of heads in exported files


class Interval(NamedTuple):
    """The keys that a query at position p attends to: from p - left to p + right, and in its chunk of so many positions; None: no bound."""

    left: int | None = None
    right: int | None = None
    chunk: int | None = None


class Extent(NamedTuple):
    """The positions that a layer has: those below `stop`, and without `negative` those from 0 on. `reason` says what they are."""

    stop: int
    reason: str
    negative: bool = True


class Coordinates(NamedTuple):
    """What the field `positions` of a call has for each row: coordinates on this number of axes, each within `extent`."""

    axes: int
    required: bool  # whether calls must have the field
    extent: Extent | None = None


class Variances(NamedTuple):
    """Mean variances of the components of queries and keys, for inputs of unit variance."""

    query: float
    key: float


class Layer(NamedTuple):
    """What the operators of one layer are made of."""

    spec: Dimensions
    weights: Mapping[str, Tensor]  # by canonical name
    dtype: torch.dtype  # of scores and norms: float64 for a float64 layer, else float32
    device: torch.device


class Draw(Protocol):
    """Draws plain Python values for random cases."""

    def flag(self, probability: float = 0.5) -> bool: ...
    def one_of(self, *options: Any) -> Any: ...
    def integer(self, low: int, high: int) -> int: ...
    def number(self, low: float, high: float) -> float: ...


class RowTerms(Protocol):
    """Terms of one call that are added to q·k, or to its scores."""

    def terms_of_rows(self, query: Tensor, rows: slice) -> Tensor:
        """The terms [b, h, rows, k] of these rows, whose queries are [b, h, rows, d]."""
        ...


class Operator:
    """One operator. Stages of SINGLE_STAGES are of at most one operator of a layer; several operators may have another one.

    Weights are 0 unless they are given or drawn, those named `…norm.weight` 1; a name `….weight` is a matrix [out, in] or a norm's.
    One that enlarges scores says so by `variances` or `score_growth`, or has `amplifies_rounding`.
    """

    name: ClassVar[str]  # of its files, here and in `reference/operators/`
    field: ClassVar[str]  # of LayerSpec
    of_calls: ClassVar[bool] = False  # whether calls may ask for it, whatever the layer has
    positional: ClassVar[bool] = False  # whether results depend on the positions of queries and keys
    num_softmaxes: ClassVar[int] = 1
    per_head: ClassVar[bool] = False  # whether heads differ by more than their projections
    normalises_heads: ClassVar[bool] = False  # whether queries and keys do not grow with their inputs
    amplifies_rounding: ClassVar[bool] = False  # whether it may amplify it without bound, so that calls run alone and not in batches
    undefined_options: ClassVar[Mapping[str, str]] = {}  # field of a request that is refused -> why
    own_outputs: ClassVar[tuple[str, ...]] = ()  # those that layers without it do not have
    newer_fields: ClassVar[tuple[str, ...]] = ()  # those newer than its part, which fingerprints omit at their defaults
    axes: ClassVar[Axes] = {}  # canonical name of each weight that it may have -> its axes
    identifying_weight: ClassVar[str] = ""  # one that layers have with it alone; "": no tensor shows that they have it
    matrices: ClassVar[tuple[str, ...]] = ()  # projections that `init` draws, in this order
    needs_projections: ClassVar[bool] = False  # whether its weights are applied to inputs, which then must not be projected already
    query_matrices: ClassVar[tuple[str, ...]] = ()  # those of its matrices that are applied to each query
    key_matrices: ClassVar[tuple[str, ...]] = ()  # … to each key
    # These follow from the stages that it has:
    mixes_heads: ClassVar[bool]  # whether weights of a head depend on other heads, so that none is computed alone
    signed_weights: ClassVar[bool]  # whether attention weights may be negative, with any sum
    scales_values: ClassVar[bool]  # whether outputs of heads are multiplied by factors that differ between queries
    same_keys_for_all_heads: ClassVar[bool]  # whether masks and biases of several heads are refused
    splits_over_keys: ClassVar[bool]  # whether results follow from those of parts that have some of the keys each
    conflicts: ClassVar[Mapping[str, str]] = {}  # field of another operator that a spec with this one cannot have -> why
    survives_conflicts: ClassVar[bool] = False  # whether random cases drop what it conflicts with, and not this one

    def __init_subclass__(cls) -> None:
        stages = stages_of(cls)
        cls.mixes_heads = "mix_weights" in stages
        cls.signed_weights = not stages.isdisjoint({"factors", "mix_weights"})
        cls.scales_values = not stages.isdisjoint({"value", "gate"})
        cls.same_keys_for_all_heads = "select" in stages
        cls.splits_over_keys = stages.isdisjoint(STAGES_OF_ALL_KEYS)

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
    def shared_key_dim(cls, part: Mapping[str, Any]) -> int:
        """How many numbers of each key all heads share by this value of its field, so that `key.weight` does not make them."""
        return 0

    @classmethod

    @classmethod
    def formula(cls, spec: Dimensions) -> dict[str, str]:
        """Stage, or `interval`, -> its formula, for pages about layers: Q, K, V, scores S, weights A, outputs O of heads.

        x are the inputs of queries, z those of keys; T is added to Q Kᵀ; `interval` is the condition for j to be visible to i.
        """
        return {}

    @classmethod
    def is_relative(cls, spec: Dimensions) -> bool:
        """Whether results depend on differences of positions only."""
        return True

    @classmethod
    def interval(cls, spec: Dimensions) -> Interval:
        """The keys that it leaves to each query. The call's masks have it, and no stage computes it."""
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
    def undefined_outputs(cls, spec: Dimensions) -> dict[str, str]:
        """Outputs that layers with it do not have -> why."""
        return {}

    @classmethod
    def widest(cls, spec: Dimensions) -> int:
        """The largest width that it adds to the layer."""
        return 1

    @classmethod
    def cost(cls, spec: Dimensions, options: CallOptions, cached: int) -> Cost:
        """What it adds to the cost of one item of a call, of whose keys the first `cached` are in a cache."""
        return Cost()

    @classmethod
    def variances(cls, spec: Dimensions, weights: Mapping[str, Tensor], before: Variances) -> Variances:
        """Those of queries and keys that have the same scores as with the operator."""
        return before

    @classmethod
    def score_growth(cls, spec: Dimensions, masks: Masks) -> float:
        """The largest factor by which scores of a call with these masks grow."""
        return 1.0

    @classmethod
    def cached(cls, spec: Dimensions) -> dict[str, CachedTensor]:
        """What it adds to each row of a cache."""
        return {}

    @classmethod
    def replaces_cached_keys(cls, spec: Dimensions) -> bool:
        """Whether keys and values follow from what it caches (`expand`), so that caches do not have them."""
        return False

    @classmethod
    def constants(cls, spec: Dimensions) -> Mapping[str, Array]:
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

    def __init__(self, layer: Layer) -> None:
        self.spec, self.dtype = layer.spec, layer.dtype

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


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[b, n, heads * d] -> [b, heads, n, d]."""
    return x.view(*x.shape[:2], heads, x.shape[2] // heads).transpose(1, 2)


def variance(weights: Mapping[str, Tensor], name: str) -> float:
    """Mean variance of the components of a projection, for inputs of unit variance."""
    variance = weights[f"{name}.weight"].double().square().sum(1)
    if f"{name}.bias" in weights:
        variance += weights[f"{name}.bias"].double().square()
    return float(variance.mean())


STAGES = tuple(name for name, method in vars(Operator).items() if callable(method) and not name.startswith("_"))
# Those whose results for some of the keys depend on the other keys. Sinks and gates are added once the parts are merged.
STAGES_OF_ALL_KEYS = frozenset({"select", "bias_of_visible", "normalise_input", "normalise", "factors", "mix_weights", "value"})
SINGLE_STAGES = frozenset({"project", "expand", "shift", "normalise", "sinks", "factors"})


def stages_of(operator: type[Operator]) -> frozenset[str]:
    """The stages that an operator has."""
    return frozenset(name for name in STAGES if getattr(operator, name) is not getattr(Operator, name))
