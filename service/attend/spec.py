"""LayerSpec, the configuration of a layer, and the fingerprint of a spec and its weights. Tier 1.

A spec determines names and shapes of weights, not their values: `attention/initialization.py` draws the values, or they come from a request
or a checkpoint. Defaults are filled in on construction, so equivalent specs are equal and have the same fingerprint.
"""

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from attend.attention.operators import OPERATORS, OperatorFields, num_softmaxes
from attend.attention.operators.declarations import Coordinates, Extent, Interval
from attend.attention.operators.operator import Operator
from attend.attention.operators.step import Value
from attend.attention.program import OPTIONAL, SINGLE, Program, outputs_of, program_of
from attend.axes import GRADIENTS
from attend.spec_parts import PROJECTIONS, WHOLE, Biases, field_error, whole
from attend.tensors import Array, datatype_of, raw

Init = Literal["xavier_uniform", "numpy_normal", "numpy_uniform", "torch_linear", "torch_mha"]
DType = Literal["float64", "float32", "bfloat16", "float16"]
MatmulPrecision = Literal["highest", "high", "medium"]
Gain = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False, strict=True)]

DERIVED = ("num_kv_heads", "head_dim", "value_head_dim", "key_dim", "value_dim", "output_dim", "bias", "scale")  # from other fields
FIRST_FIELDS = {  # of 0.1.0. A fingerprint leaves out others at their defaults, so that those of layers without them remain valid
    *("d_model", "num_heads", "num_kv_heads", "head_dim", "value_head_dim", "key_dim", "value_dim", "output_dim", "bias", "scale"),
    *("projections", "softcap", "window", "rope", "alibi", "relative_bias", "qk_norm", "sinks", "dtype"),
}


def _allow_null(schema: dict[str, Any]) -> None:
    """Adds null to the JSON schema of every field that may be left out, and removes defaults that are derived from other fields."""
    for name, field in schema["properties"].items():
        if name in DERIVED:
            field.pop("default", None)
        if name not in schema["required"] and {"type": "null"} not in field.get("anyOf", []):
            texts = {key: field.pop(key) for key in ("title", "description", "default", "examples") if key in field}
            schema["properties"][name] = {"anyOf": [*(field.get("anyOf") or [field]), {"type": "null"}], **texts}


class LayerSpec(OperatorFields):
    """One multi-head attention layer.

    Shapes: queries [b, q, d_model], keys [b, k, key_dim], values [b, k, value_dim], output [b, q, output_dim]. With `projections` false,
    queries [b, q, num_heads*head_dim], keys [b, k, num_kv_heads*head_dim], values and output in the same way of value_head_dim.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=_allow_null)

    expected_instead: ClassVar[Mapping[str, str]] = {  # names in other libraries -> the field
        **dict.fromkeys(("embed_dim", "hidden_size", "num_hiddens"), "d_model"),
        **dict.fromkeys(("n_head", "n_heads", "nhead", "num_attention_heads"), "num_heads"),
        **dict.fromkeys(("n_kv_heads", "num_key_value_heads"), "num_kv_heads"),
        **dict.fromkeys(("attention_bias", "qkv_bias", "use_bias"), "bias"),
        **dict.fromkeys(("causal", "dropout"), "no field of that name, which belongs to each call"),
        "kdim": "key_dim",
        "rope_theta": 'rope {"theta"}',
        "vdim": "value_dim",
    }

    seed: Annotated[int, Field(ge=0, le=2**32 - 1, strict=True), WHOLE] | None = Field(
        default=0, description="Seed of the drawn weights; null if weights were given."
    )
    init: Init | None = Field(default="xavier_uniform", description="Distribution of the drawn weights; null if weights were given.")
    gain: Gain = Field(default=1.0, description="Factor on what `init` draws; 1 if weights were given.")
    dtype: DType = Field(default="float32", description="Datatype of the weights and the computation.")
    matmul_precision: MatmulPrecision = Field(
        default="highest",
        description="Precision of float32 products: highest is float32; high and medium allow TF32 on GPUs.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        filled = {k: whole(v) for k, v in data.items() if v is not None or k == "init"}  # elsewhere null means the default
        d_model, heads = filled.get("d_model"), filled.get("num_heads")
        if type(d_model) is int and type(heads) is int and heads > 0 and d_model > 0:
            filled.setdefault("num_kv_heads", heads)
            if d_model % heads == 0:
                filled.setdefault("head_dim", d_model // heads)
            _fill_widths(filled, d_model, heads)
        if "init" in filled and filled["init"] is None:  # weights are given
            filled["seed"] = None
        if str(filled.get("init", "")).startswith("numpy_") or filled.get("projections") is False:
            filled.setdefault("bias", False)
        bias = filled.get("bias")
        if isinstance(bias, Mapping) and set(bias) == set(PROJECTIONS) and all(flag is bias["query"] for flag in bias.values()):
            filled["bias"] = bias["query"]  # one value means all
        return filled

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_heads()
        self._check_init()
        self._check_steps()
        self._check_conflicts()
        for operator in self.operators:
            operator.check(self)
        return self

    def _check_steps(self) -> None:
        """Refuse two operators with steps at a place of the program that only one operator of a layer can have."""
        fields: dict[str, str] = {}  # place -> that of the first operator
        for operator in self.operators:
            for place in SINGLE & {*operator.steps(self)}:
                if place in fields:
                    raise field_error(f"/{operator.field}", f"none, since {fields[place]} is computed in its place", "one")
                fields[place] = operator.field

    def _check_conflicts(self) -> None:
        """Refuse an operator that another one of the layer conflicts with."""
        for operator in self.operators:
            for other in self.operators:
                if (reason := operator.conflicts.get(other.field)) is not None:
                    default = type(self).model_fields[other.field].default
                    expected = default if isinstance(default, str) else json.dumps(default)
                    raise field_error(f"/{other.field}", f"{expected}, since {reason}", other.name)

    def _check_heads(self) -> None:
        """Refuse numbers and widths of heads that do not fit each other."""
        if self.num_heads % self.num_kv_heads:
            raise field_error("/num_kv_heads", f"a divisor of num_heads {self.num_heads}", str(self.num_kv_heads))
        if not self.scale:  # elsewhere 0 means the default; here it would make all weights equal
            raise field_error("/scale", "a number other than 0, or null for the default", str(self.scale))

    def _check_init(self) -> None:
        """Refuse widths, biases and features that the init, or a layer without projections, does not have."""
        init, square = self.init or "", dict.fromkeys(self._widths(), self.d_model)
        if not self.projections:
            projected = self._projected_widths()
            self._require_widths({f"{name}_dim": projected[name] for name in ("key", "value", "output")}, "since nothing is projected")
        elif init.startswith("numpy_"):
            self._require_widths(square, f"since init {init} draws square d_model matrices")
        if init == "torch_mha":
            self._require_widths(square | {"key_dim": self.key_dim, "value_dim": self.value_dim}, "as torch.nn.MultiheadAttention has")
            if isinstance(self.bias, Biases):
                expected = "true or false for all, as torch.nn.MultiheadAttention has"
                raise field_error("/bias", expected, "one for each projection")
        if self.bias and not self.projections:
            raise field_error("/bias", "false, since nothing is projected", "a bias")
        if self.bias and init.startswith("numpy_"):
            raise field_error("/bias", f"false, since init {init} has no bias", "true")
        for operator in self.operators:
            if operator.needs_projections and not self.projections:
                raise field_error(f"/{operator.field}", "null, since nothing is projected", "one")
            if operator.needs_projections and init in ("numpy_normal", "numpy_uniform", "torch_mha"):
                raise field_error(f"/{operator.field}", f"null, since init {init} draws query, key, value and output alone", "one")

    def _require_widths(self, expected: Mapping[str, int], reason: str) -> None:
        """Refuse the first of these fields that determines another width than the expected one."""
        for name, width in self._widths().items():
            if name in expected and width != expected[name]:
                raise field_error(f"/{name}", f"{expected[name]}, {reason}", str(width))

    def _widths(self) -> dict[str, int]:
        """Field -> the width that it determines, for all widths that may differ from d_model."""
        return {
            "head_dim": self.num_heads * self.head_dim,
            "num_kv_heads": self.num_kv_heads * self.head_dim,
            "value_head_dim": self.num_kv_heads * self.value_head_dim,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "output_dim": self.output_dim,
        }

    def _projected_widths(self) -> dict[str, int]:
        """Projection -> width of all its heads; `output` is the width of the concatenated heads."""
        kv, heads = self.num_kv_heads, self.num_heads
        return {
            "query": heads * self.head_dim,
            "key": kv * self.head_dim,
            "value": kv * self.value_head_dim,
            "output": heads * self.value_head_dim,
        }

    @property
    def widest(self) -> int:
        """Largest width of an input, a projection or the output."""
        inputs, added = (
            (self.d_model, self.key_dim, self.value_dim, self.output_dim),
            (operator.widest(self) for operator in self.operators),
        )
        return max(*inputs, *self._projected_widths().values(), *added)

    @property
    def query_dim(self) -> int:
        """Width of the queries in requests."""
        return self.d_model if self.projections else self.num_heads * self.head_dim

    @cached_property
    def operators(self) -> tuple[type[Operator], ...]:
        """The operators of the layer."""
        return tuple(operator for operator in OPERATORS if operator.is_active(self))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other values of some fields, which are not validated. What is derived from them is derived again."""
        copied = super().model_copy(update=update, deep=deep)
        for name, attribute in vars(LayerSpec).items():
            if isinstance(attribute, cached_property):
                copied.__dict__.pop(name, None)
        return copied

    @property
    def num_softmaxes(self) -> int:
        """Number of softmaxes of each head, among which the numbers of its queries and keys are divided."""
        return num_softmaxes({operator.field for operator in self.operators})

    @cached_property
    def all_operators(self) -> tuple[type[Operator], ...]:
        """The operators of the layer, and those that calls may ask for."""
        return tuple(operator for operator in OPERATORS if operator.of_calls or operator in self.operators)

    @cached_property
    def program(self) -> Program:
        """The steps of a call that asks for nothing that the layer does not have."""
        return program_of(self, self.features)

    @property
    def features(self) -> set[str]:
        """The features, for `program_of`, of a call that asks for nothing that the layer does not have."""
        own = {operator.field for operator in self.operators if operator.of_calls}
        return own | ({"intervals"} if any(map(str, self.intervals)) else set())

    @cached_property
    def signed_weights(self) -> str:
        """The field that makes attention weights negative, with any sum; "" if none does."""
        return next((operator.field for operator in self.operators if any(step.signed for step in operator.own_steps(self))), "")

    @cached_property
    def undefined_options(self) -> dict[str, str]:
        """Fields of requests that the layer refuses -> why."""
        return {name: reason for operator in self.operators for name, reason in operator.undefined_options.items()}

    @property
    def positional(self) -> str:
        """The first field that makes results depend on the positions of queries and keys, "" if there is none."""
        return next((operator.field for operator in self.operators if operator.positional), "")

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """The keys that each operator leaves to a query."""
        return tuple(operator.interval(self) for operator in self.operators)

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The positions that queries and keys may have, by each operator that has a bound."""
        return tuple(extent for operator in self.operators if (extent := operator.extent(self)) is not None)

    @property
    def coordinates(self) -> Coordinates | None:
        """What calls have in the field `positions`; None: they have none."""
        return next((found for operator in self.operators if (found := operator.coordinates(self)) is not None), None)

    @property
    def normalises_heads(self) -> bool:
        """Whether queries and keys do not grow with their inputs."""
        return any(operator.normalises_heads for operator in self.operators)

    @property
    def is_relative(self) -> bool:
        """Whether results depend on differences of positions only."""
        return all(operator.is_relative(self) for operator in self.operators)

    @cached_property
    def splits_over_keys(self) -> bool:
        """Whether the result of a call follows from those of parts that have some of its keys each, numbered from 0."""
        return self.is_relative and not any(step.all_keys for step in self.program)

    @cached_property
    def reads_hidden_keys(self) -> bool:
        """Whether results depend on keys that are masked for every query: they are neither left out of calls nor freed in caches."""
        return any(step.expands and step.all_keys for step in self.program)

    def outputs(self, features: Collection[str] = ()) -> Mapping[str, Value]:
        """What calls with these features beside the layer's own may ask for, gradients aside, with the axes of each output."""
        return outputs_of(self, frozenset({*self.features, *features}))

    @cached_property
    def every_output(self) -> Mapping[str, Value]:
        """Every output that some call may ask for."""
        return {**self.outputs(OPTIONAL), **{name: Value(axes) for name, axes in GRADIENTS.items()}}

    def output_shape(self, name: str, b: int, q: int, k: int) -> tuple[int, ...]:
        """The shape of an output for b items of q queries and k keys, -1 for unknown numbers, without a selection."""
        lengths = {"b": b, "q": q, "k": k}

        def length(axis: str) -> int:
            whole, _, divisor = axis.partition(" / ")
            n = lengths[whole] if whole in lengths else self.length_of(whole)
            return n if n < 0 or not divisor else -(-n // self.length_of(divisor))

        return tuple(map(length, self.every_output[name].output_axes))

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of every weight. A projection is applied as `x @ W.T + b`, so W is [out, in]."""
        shapes: dict[str, tuple[int, ...]] = {}
        widths = self._projected_widths()
        ins = {"query": self.d_model, "key": self.key_dim, "value": self.value_dim, "output": widths["output"]}
        for name in PROJECTIONS if self.projections else ():
            out = self.output_dim if name == "output" else widths[name]
            shapes[f"{name}.weight"] = (out, ins[name])
            if self.has_bias(name):
                shapes[f"{name}.bias"] = (out,)
        for operator in self.operators:
            shapes |= operator.weights(self)
        return shapes

    def length_of(self, axis: str) -> int:
        """The length of an axis of a value that does not depend on the call, such as `h`, `head_dim` or a width of an operator."""
        fixed = {"h": self.num_heads, "kv heads": self.num_kv_heads}
        if axis.isdigit():
            return int(axis)
        if " * " in axis:
            return math.prod(map(self.length_of, axis.split(" * ")))
        parts = (self, *(getattr(self, operator.field) for operator in self.operators))
        return fixed[axis] if axis in fixed else next(int(getattr(part, axis)) for part in parts if hasattr(part, axis))

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.weight_shapes().values())


def _fill_widths(filled: dict[str, Any], d_model: int, heads: int) -> None:
    """Fills in widths that follow from other fields, if those are integers; validation refuses others later."""
    head_dim, kv = filled.get("head_dim"), filled["num_kv_heads"]
    if type(head_dim) is not int or type(kv) is not int:
        if "head_dim" not in filled:
            raise field_error("/num_heads", f"a divisor of d_model {d_model}, or a head_dim", str(heads))
        return
    value_head_dim = filled.setdefault("value_head_dim", head_dim)
    width = head_dim // num_softmaxes([name for name, value in filled.items() if value is not None])
    if width > 0:
        filled.setdefault("scale", 1 / math.sqrt(width))
    if filled.get("projections") is False and type(value_head_dim) is int:
        filled.setdefault("key_dim", kv * head_dim)
        filled.setdefault("value_dim", kv * value_head_dim)
        filled.setdefault("output_dim", heads * value_head_dim)
    for operator in OPERATORS:
        operator.fill_in(filled, width)
    for name in ("key_dim", "value_dim", "output_dim"):
        filled.setdefault(name, d_model)


def _omit_defaults(fields: dict[str, Any], model: type[BaseModel], names: Collection[str]) -> None:
    """Delete those of these fields of a model that are at their defaults."""
    for name in names:
        if name in fields and fields[name] == model.model_fields[name].default:
            del fields[name]


def fingerprint(spec: LayerSpec, weights: Mapping[str, Array]) -> str:
    """SHA-256, in hex, of the spec and the weights, which identifies the layer's results.

    The digest is of the canonical JSON of the spec (sorted keys, no spaces, defaults filled in, without `seed`, `init`, `gain`,
    `matmul_precision` and the fields that are newer than 0.1.0 at their defaults), then for each weight in order of name a line
    `name dtype shape\\n` (`query.weight FP32 [64,64]`) and its little-endian row-major bytes.
    """
    document = spec.model_dump(mode="json", exclude={"seed", "init", "gain", "matmul_precision"})
    _omit_defaults(document, LayerSpec, set(LayerSpec.model_fields) - FIRST_FIELDS)
    for operator in spec.operators:
        _omit_defaults(document[operator.field], type(getattr(spec, operator.field)), operator.newer_fields)
    digest = hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())
    for name in sorted(weights):
        array = weights[name]
        shape = json.dumps(list(array.shape), separators=(",", ":"))
        digest.update(f"{name} {datatype_of(array).name} {shape}\n".encode())
        digest.update(raw(array))
    return digest.hexdigest()
