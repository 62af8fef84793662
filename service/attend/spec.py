"""LayerSpec, the configuration of a layer. Tier 1.

A spec determines names and shapes of weights, not their values: `attention/initialization.py` draws the values, or they come from a request
or a checkpoint. Defaults are filled in on construction, so equivalent specs are equal.
"""

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from attend.attention.operators import OPERATORS, num_softmaxes
from attend.attention.program import SINGLE
from attend.spec_parts import PROJECTIONS, WHOLE, Biases, field_error, whole
from attend.spec_properties import SpecProperties

Init = Literal["xavier_uniform", "numpy_normal", "numpy_uniform", "torch_linear", "torch_mha"]
DType = Literal["float64", "float32", "bfloat16", "float16"]
MatmulPrecision = Literal["highest", "high", "medium"]
Gain = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False, strict=True)]

DERIVED = ("num_kv_heads", "head_dim", "value_head_dim", "key_dim", "value_dim", "output_dim", "bias", "scale")  # from other fields


def _allow_null(schema: dict[str, Any]) -> None:
    """Adds null to the JSON schema of every field that may be left out, and removes defaults that are derived from other fields."""
    for name, field in schema["properties"].items():
        if name in DERIVED:
            field.pop("default", None)
        if name not in schema["required"] and {"type": "null"} not in field.get("anyOf", []):
            texts = {key: field.pop(key) for key in ("title", "description", "default", "examples") if key in field}
            schema["properties"][name] = {"anyOf": [*(field.get("anyOf") or [field]), {"type": "null"}], **texts}


class LayerSpec(SpecProperties):
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
            projected = self.projected_widths()
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
