"""LayerSpec, the configuration of a layer, and the fingerprint of a spec and its weights. Floor 1.

A spec determines names and shapes of weights, not their values: `attention/initialization.py` draws the values, or they come from a request
or a checkpoint. Defaults are filled in on construction, so equivalent specs are equal and have the same fingerprint.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from service.spec_parts import (
    PROJECTIONS,
    Biases,
    Differential,
    Finite,
    Flag,
    GridBias,
    Indexer,
    Latent,
    OutputGate,
    QKNorm,
    QueryScale,
    RelativeBias,
    RelativeScores,
    Rope,
    Width,
    Window,
    bias_of_each,
    field_error,
)
from service.tensors import Array, datatype_of, raw

Init = Literal["xavier_uniform", "numpy_normal", "numpy_uniform", "torch_linear", "torch_mha"]
DType = Literal["float64", "float32", "bfloat16", "float16"]
MatmulPrecision = Literal["highest", "high", "medium"]
Gain = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False, strict=True)]
Normalizer = Literal["softmax", "scalable_softmax", "sigmoid"]

DERIVED = ("num_kv_heads", "head_dim", "value_head_dim", "key_dim", "value_dim", "output_dim", "bias", "scale")  # from other fields
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
ADDED_FIELDS: dict[str, dict[str, Any]] = {  # fields added after 0.1.0, with defaults: fingerprints of layers without them remain valid
    "": dict.fromkeys(("chunk_size", "query_scale", "relative_scores", "grid_bias", "output_gate", "latent", "differential"), None)
    | {"normalizer": "softmax", "indexer": None},
    "rope": {"frequencies": None, "attention_factor": 1.0, "max_length": None, "axes": None, "requires_positions": False},
    "qk_norm": {"over": "head", "weights": "shared", "bias": False, "after_rope": False, "values": False},
}


def _admit_null(schema: dict[str, Any]) -> None:
    """Adds null to the JSON schema of every field that may be left out, and removes defaults that are derived from other fields."""
    for name, field in schema["properties"].items():
        if name in DERIVED:
            field.pop("default", None)
        if name not in schema["required"] and {"type": "null"} not in field.get("anyOf", []):
            texts = {key: field.pop(key) for key in ("title", "description", "default", "examples") if key in field}
            schema["properties"][name] = {"anyOf": [*(field.get("anyOf") or [field]), {"type": "null"}], **texts}


class LayerSpec(BaseModel):
    """One multi-head attention layer.

    Shapes: queries [b, q, d_model], keys [b, k, key_dim], values [b, k, value_dim], output [b, q, output_dim]. With `projections` false,
    queries [b, q, num_heads*head_dim], keys [b, k, num_kv_heads*head_dim], values and output in the same way of value_head_dim.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=_admit_null)

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

    d_model: Width = Field(description="Width of the queries.", examples=[64])
    num_heads: Width = Field(description="Number of query heads.", examples=[8])
    num_kv_heads: Width = Field(
        default=0, description="Number of heads of keys and values, each shared by a group of query heads; num_heads if left out."
    )
    head_dim: Width = Field(default=0, description="Width of a head's queries and keys; d_model/num_heads if left out.")
    value_head_dim: Width = Field(default=0, description="Width of a head's values; head_dim if left out.")
    key_dim: Width = Field(default=0, description="Width of the keys in requests; d_model if left out, or value_dim with `latent`.")
    value_dim: Width = Field(default=0, description="Width of the values in requests; d_model if left out, or key_dim with `latent`.")
    output_dim: Width = Field(default=0, description="Width of the output; d_model if left out.")
    bias: Annotated[bool | Biases, BeforeValidator(bias_of_each)] = Field(
        default=True, description="Whether projections have a bias, for all or for each; by default true, but false for the numpy_* inits."
    )
    projections: Flag = Field(
        default=True, description="If false, requests have projected queries, keys and values, and the output is not projected."
    )
    scale: Finite = Field(
        default=math.nan,
        description="Factor on query·key, not 0; 1/sqrt(head_dim) if left out, with `differential` 1/sqrt(head_dim/2).",
    )
    softcap: Annotated[Finite, Field(ge=0)] | None = Field(
        default=None, description="c in c·tanh(scores/c), before masks; null or 0 for none."
    )
    window: Window | None = Field(default=None, description="Window of keys around each query's position, in every call.")
    chunk_size: Width | None = Field(
        default=None, description="A query attends only to keys in its own chunk of this many positions (Llama 4)."
    )
    rope: Rope | None = Field(default=None, description="Rotary position embedding.")
    query_scale: QueryScale | None = Field(default=None, description="Factor on queries that grows with their position.")
    alibi: Flag = Field(default=False, description="Biases linear in the distance (Press et al. 2022).")
    relative_bias: RelativeBias | None = Field(default=None, description="T5's relative position bias.")
    relative_scores: RelativeScores | None = Field(
        default=None, description="Terms of the scores that depend on content and distance (Transformer-XL, DeBERTa)."
    )
    grid_bias: GridBias | None = Field(default=None, description="Scores by relative position in a grid of tokens, such as an image.")
    qk_norm: QKNorm | None = Field(default=None, description="Normalisation of queries and keys.")
    sinks: Flag = Field(
        default=False, description="A learnt logit for each head, the weight `sinks`, that takes part in the softmax but has no value."
    )
    output_gate: OutputGate | None = Field(default=None, description="Gate on the output of each head, before the output projection.")
    latent: Latent | None = Field(default=None, description="Multi-head latent attention.")
    differential: Differential | None = Field(default=None, description="Differential attention, whose weights may be negative.")
    normalizer: Normalizer = Field(
        default="softmax",
        description="How scores S become weights: softmax(S); scalable_softmax, softmax(ln(n) S) for a row that may attend to n keys "
        "(Nakanishi 2025, arXiv 2501.19399); sigmoid, 1/(1 + exp(ln(n) - S)) for n keys in the query's sequence, without padding and other "
        "segments (Ramapuram et al. 2024, arXiv 2409.04431).",
    )
    indexer: Indexer | None = Field(default=None, description="Selection of the keys that each query attends to.")
    seed: Annotated[int, Field(ge=0, le=2**32 - 1, strict=True)] | None = Field(
        default=0, description="Seed of the drawn weights; null if weights were given."
    )
    init: Init | None = Field(default="xavier_uniform", description="Distribution of the drawn weights; null if weights were given.")
    gain: Gain = Field(default=1.0, description="Factor on what `init` draws; 1 if weights were given.")
    dtype: DType = Field(default="float32", description="Datatype of the weights and the computation.")
    matmul_precision: MatmulPrecision = Field(
        default="highest",
        description="Precision of float32 products: highest is float32; high and medium allow TF32 or bfloat16 internally.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        filled = {k: v for k, v in data.items() if v is not None or k == "init"}  # elsewhere null means the default
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
        if filled.get("softcap") == 0 and filled["softcap"] is not False:
            filled["softcap"] = None
        bias = filled.get("bias")
        if isinstance(bias, Mapping) and set(bias) == set(PROJECTIONS) and all(flag is bias["query"] for flag in bias.values()):
            filled["bias"] = bias["query"]  # one value means all
        return filled

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_heads()
        self._check_init()
        self._check_features()
        return self

    def _check_heads(self) -> None:
        """Refuse numbers and widths of heads that do not fit each other."""
        if self.num_heads % self.num_kv_heads:
            raise field_error("/num_kv_heads", f"a divisor of num_heads {self.num_heads}", str(self.num_kv_heads))
        if not self.scale:  # elsewhere 0 means the default; here it would make all weights equal
            raise field_error("/scale", "a number other than 0, or null for the default", str(self.scale))
        if self.differential:
            self._check_differential()
        width = self.head_dim // 2 if self.differential else self.head_dim
        if self.rope and ((dims := self.rope.dims or width) > width or dims % 2):
            most = f"{width}, half of head_dim" if self.differential else f"head_dim {width}"
            raise field_error("/rope/dims", f"an even number of at most {most}", str(dims))

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
        for name in ("output_gate", "latent", "relative_scores", "indexer"):
            if getattr(self, name) and not self.projections:
                raise field_error(f"/{name}", "null, since nothing is projected", "one")
            if getattr(self, name) and init in ("numpy_normal", "numpy_uniform", "torch_mha"):
                raise field_error(f"/{name}", f"null, since init {init} draws query, key, value and output alone", "one")

    def _check_features(self) -> None:
        """Refuse features that do not fit each other."""
        if self.indexer and self.rope and (dims := self.rope.dims or 0) > self.indexer.head_dim:
            raise field_error("/indexer/head_dim", f"at least {dims}, which RoPE rotates", str(self.indexer.head_dim))
        if self.sinks and self.normalizer == "sigmoid":
            raise field_error("/sinks", "false, since sigmoid weights do not depend on other scores", "true")
        if self.latent and self.latent.rope_key_dim >= self.head_dim:
            raise field_error("/latent/rope_key_dim", f"less than head_dim {self.head_dim}", str(self.latent.rope_key_dim))
        if self.latent and self.value_dim != self.key_dim:
            expected = f"{self.key_dim}, the key_dim, since latent projects keys and values by one matrix, key_value_down.weight"
            raise field_error("/value_dim", expected, str(self.value_dim))
        for name in ("rope", "query_scale"):
            if self.relative_scores and getattr(self, name):
                raise field_error(f"/{name}", "null, since relative_scores has the positions of this layer", "one")
        if self.relative_scores and self.relative_scores.kind == "transformer_xl" and self.d_model % 2:
            raise field_error("/d_model", "an even number, for the sines and cosines of relative_scores", str(self.d_model))

    def _check_differential(self) -> None:
        """Refuse what differential attention is not defined with."""
        if self.head_dim % 2:
            raise field_error("/head_dim", "an even number, since differential attention halves it", str(self.head_dim))
        for name, absent in (("qk_norm", "null"), ("latent", "null"), ("relative_scores", "null"), ("sinks", "false")):
            if getattr(self, name):
                raise field_error(f"/{name}", f"{absent}, since differential attention is not defined with it", "one")
        if self.normalizer != "softmax":
            raise field_error("/normalizer", "softmax, since differential attention is the difference of two", self.normalizer)
        if self.grid_bias and self.grid_bias.kind == "decomposed":
            raise field_error("/grid_bias/kind", "table, since differential attention has two queries", "decomposed")

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
        ranks = (self.latent.key_value_rank, self.latent.query_rank or 1) if self.latent else ()
        index_width = self.indexer.num_heads * self.indexer.head_dim if self.indexer else 0
        return max(self.d_model, self.key_dim, self.value_dim, self.output_dim, *self._projected_widths().values(), *ranks, index_width)

    @property
    def query_dim(self) -> int:
        """Width of the queries in requests."""
        return self.d_model if self.projections else self.num_heads * self.head_dim

    @property
    def concatenated_dim(self) -> int:
        """Width of the concatenated heads."""
        return self.num_heads * self.value_head_dim

    @property
    def gate_dim(self) -> int:
        """Width of the projection of the gate; 0 without a gate."""
        if self.output_gate is None:
            return 0
        return self.num_heads if self.output_gate.granularity == "headwise" else self.concatenated_dim

    @property
    def positional(self) -> str:
        """The first field that makes results depend on the positions of queries and keys, "" if there is none."""
        names = ("window", "chunk_size", "rope", "query_scale", "alibi", "relative_bias", "relative_scores", "grid_bias")
        return next((name for name in names if getattr(self, name)), "")

    @property
    def is_relative(self) -> bool:
        """Whether results depend on differences of positions only.

        Chunks, factors by position, grids, and a norm after RoPE that treats dimensions differently end that.
        """
        norm = self.qk_norm
        uneven = self.rope and norm and norm.after_rope and (norm.weights != "none" or norm.kind == "layer")
        return not (self.chunk_size or self.query_scale or self.grid_bias or uneven)

    @property
    def splits_over_keys(self) -> bool:
        """Whether the result of a call follows from those of parts that have some of its keys each, numbered from 0."""
        return self.is_relative and not (self.differential or self.indexer) and self.normalizer == "softmax"

    @property
    def undefined_outputs(self) -> dict[str, str]:
        """Outputs that the layer does not have -> why."""
        undefined = {} if self.indexer else {"indexer_mask": "which has no indexer"}
        if self.latent is None:
            undefined |= dict.fromkeys(("latent", "rope_key"), "which has no latent attention")
        elif self.qk_norm or (self.rope and (self.rope.dims or 0) > self.latent.rope_key_dim):
            undefined["rope_key"] = "whose qk_norm, or rope of more than rope_key_dim numbers, makes them differ between heads"
        if self.differential:
            return undefined | dict.fromkeys(("scores", "log_sum_exp"), "whose differential attention has two scores of each query and key")
        if self.normalizer == "sigmoid":
            return undefined | {"log_sum_exp": "whose sigmoid weights are not divided by a sum"}
        return undefined

    def has_bias(self, projection: str) -> bool:
        return self.bias if isinstance(self.bias, bool) else bool(getattr(self.bias, projection))

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of every weight. A projection is applied as `x @ W.T + b`, so W is [out, in]."""
        shapes = self._projection_shapes()
        if self.qk_norm and self.qk_norm.weights != "none":
            for name, heads in (("query_norm", self.num_heads), ("key_norm", self.num_kv_heads)):
                shape = (self.head_dim,) if self.qk_norm.weights == "shared" else (heads, self.head_dim)
                shapes |= {f"{name}.{part}": shape for part in ("weight", "bias")[: 1 + self.qk_norm.bias]}
        if self.output_gate:
            shapes["gate.weight"] = (self.gate_dim, self.d_model)
            if self.output_gate.bias:
                shapes["gate.bias"] = (self.gate_dim,)
        if self.differential:
            shapes |= dict.fromkeys(LAMBDAS, (self.head_dim // 2,))
            if self.differential.norm_weights:
                shapes["head_norm.weight"] = (self.value_head_dim,)
        if (indexer := self.indexer) is not None:
            query_width = (self.latent and self.latent.query_rank) or self.d_model
            shapes["index_query.weight"] = (indexer.num_heads * indexer.head_dim, query_width)
            shapes["index_key.weight"] = (indexer.head_dim, self.key_dim)
            shapes |= dict.fromkeys(("index_key_norm.weight", "index_key_norm.bias"), (indexer.head_dim,))
            shapes["index_head_weights.weight"] = (indexer.num_heads, self.d_model)
        if self.sinks:
            shapes["sinks"] = (self.num_heads,)
        return shapes | self._position_shapes()

    def _projection_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights of query, key, value and output, and of the first step of latent attention."""
        shapes: dict[str, tuple[int, ...]] = {}
        widths = self._projected_widths()
        ins = {"query": self.d_model, "key": self.key_dim, "value": self.value_dim, "output": widths["output"]}
        if (latent := self.latent) is not None:
            shapes |= self._down_shapes(latent)
            widths["key"] -= self.num_kv_heads * latent.rope_key_dim
            ins |= {"query": latent.query_rank or self.d_model, "key": latent.key_value_rank, "value": latent.key_value_rank}
        for name in PROJECTIONS if self.projections else ():
            out = self.output_dim if name == "output" else widths[name]
            shapes[f"{name}.weight"] = (out, ins[name])
            if self.has_bias(name):
                shapes[f"{name}.bias"] = (out,)
        return shapes

    def _down_shapes(self, latent: Latent) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights of the first step of latent attention."""
        down = {"key_value_down": (latent.key_value_rank, self.key_dim), "rope_key": (latent.rope_key_dim, self.key_dim)}
        down |= {"query_down": (latent.query_rank, self.d_model)} if latent.query_rank else {}
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in down.items()}
        if latent.bias:
            shapes |= {f"{name}.bias": shape[:1] for name, shape in down.items()}
        return shapes | {f"{name}_norm.weight": shape[:1] for name, shape in down.items() if name != "rope_key"}

    def _position_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights of scores and biases by position."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.relative_bias:
            shapes["relative_bias"] = (self.relative_bias.buckets, self.num_heads)
        if (relative := self.relative_scores) is not None:
            shapes["position_key.weight"] = (self.num_heads * self.head_dim, 2 * relative.columns or self.d_model)
            if relative.kind == "transformer_xl":
                shapes |= dict.fromkeys(("content_bias", "position_bias"), (self.num_heads, self.head_dim))
            elif relative.position_to_content:
                shapes["position_query.weight"] = shapes["position_key.weight"]
        if (grid := self.grid_bias) is not None:
            rows, columns = 2 * grid.height - 1, 2 * grid.width - 1
            if grid.kind == "table":
                shapes["grid_bias"] = (rows * columns + 3 * grid.class_token, self.num_heads)
            else:
                shapes |= {"grid_rows": (rows, self.head_dim), "grid_columns": (columns, self.head_dim)}
        return shapes

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
    width = head_dim if filled.get("differential") is None else head_dim // 2
    if isinstance(rope := filled.get("rope"), Mapping) and rope.get("dims") is None:
        filled["rope"] = {**rope, "dims": width}
    if width > 0:
        filled.setdefault("scale", 1 / math.sqrt(width))
    if filled.get("projections") is False and type(value_head_dim) is int:
        filled.setdefault("key_dim", kv * head_dim)
        filled.setdefault("value_dim", kv * value_head_dim)
        filled.setdefault("output_dim", heads * value_head_dim)
    if filled.get("latent"):  # keys and values have the same width
        filled.setdefault("value_dim", filled.setdefault("key_dim", filled.get("value_dim", d_model)))
    for name in ("key_dim", "value_dim", "output_dim"):
        filled.setdefault(name, d_model)


def fingerprint(spec: LayerSpec, weights: Mapping[str, Array]) -> str:
    """SHA-256, in hex, of the spec and the weights, which identifies the layer's results.

    The digest is of the canonical JSON of the spec (sorted keys, no spaces, defaults filled in, without `seed`, `init`, `gain`,
    `matmul_precision` and the fields of ADDED_FIELDS at their defaults), then for each weight in order of name a line `name dtype shape\\n`
    (`query.weight FP32 [64,64]`) and its little-endian row-major bytes.
    """
    document = spec.model_dump(mode="json", exclude={"seed", "init", "gain", "matmul_precision"})
    for part, defaults in ADDED_FIELDS.items():
        if (fields := document[part] if part else document) is not None:
            for name in [name for name, default in defaults.items() if fields[name] == default]:
                del fields[name]
    digest = hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())
    for name in sorted(weights):
        array = weights[name]
        shape = json.dumps(list(array.shape), separators=(",", ":"))
        digest.update(f"{name} {datatype_of(array).name} {shape}\n".encode())
        digest.update(raw(array))
    return digest.hexdigest()
