"""LayerSpec: everything that determines a layer, and the fingerprint that names its content. Floor 1.

A spec knows shapes and names of weights, never their values: `attention/initialise.py` draws them, a request may bring them.
Fields of `None` are filled in on construction, so that two specs that mean the same are equal and have the same fingerprint.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from service.tensors import Array, datatype_of, raw

Init = Literal["xavier_uniform", "numpy_normal", "numpy_uniform", "torch_linear", "torch_mha"]
DType = Literal["float64", "float32", "bfloat16", "float16"]
MatmulPrecision = Literal["highest", "high", "medium"]
Width = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
LARGEST = 1e30  # of a factor: far from anything sensible, and as far from what float32 overflows at
Finite = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False, strict=True)]

PROJECTIONS = ("query", "key", "value", "output")


def disagreement(at: str, expected: str, got: str) -> PydanticCustomError:
    """An error for validators: `at` is a pointer below the place where pydantic noticed."""
    return PydanticCustomError("disagreement", "expected {expected}, got {got}", {"expected": expected, "got": got, "at": at})


class LayerSpec(BaseModel):
    """One multi-head attention layer.

    Shapes: queries [b, q, d_model], keys [b, k, key_dim], values [b, k, value_dim], output [b, q, d_model].
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    d_model: Width = Field(description="Width of the queries and of the output.", examples=[64])
    num_heads: Width = Field(description="Number of heads; divides d_model.", examples=[8])
    key_dim: Width = Field(default=0, description="Width of the keys as they come; d_model if left out.", validate_default=False)
    value_dim: Width = Field(default=0, description="Width of the values as they come; d_model if left out.", validate_default=False)
    bias: Annotated[bool, Field(strict=True)] = Field(
        default=True, description="Whether the four projections have a bias; default true, false for the numpy_* inits."
    )
    scale: Finite = Field(default=math.nan, description="Factor on query·key; 1/sqrt(head_dim) if left out.", validate_default=False)
    softcap: Annotated[Finite, Field(ge=0)] | None = Field(
        default=None, description="c in c·tanh(scores/c), before masks; null or 0 for none."
    )
    seed: Annotated[int, Field(ge=0, le=2**32 - 1, strict=True)] = Field(default=0, description="Of the drawn weights.")
    init: Init = Field(default="xavier_uniform", description="How the weights are drawn.")
    dtype: DType = Field(default="float32", description="Of the weights and the computation.")
    matmul_precision: MatmulPrecision = Field(
        default="highest", description="Of float32 products: highest is float32, high and medium allow TF32 or bfloat16 inside."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        filled = {k: v for k, v in data.items() if v is not None or k == "softcap"}
        d_model, heads = filled.get("d_model"), filled.get("num_heads")
        if type(d_model) is int:
            filled.setdefault("key_dim", d_model)
            filled.setdefault("value_dim", d_model)
            if type(heads) is int and heads > 0 and d_model >= heads:
                filled.setdefault("scale", 1 / math.sqrt(d_model // heads))
        if str(filled.get("init", "")).startswith("numpy_"):
            filled.setdefault("bias", False)
        if filled.get("softcap") == 0:
            filled["softcap"] = None
        return filled

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.d_model % self.num_heads:
            raise disagreement("/num_heads", f"a divisor of d_model {self.d_model}", str(self.num_heads))
        if self.init.startswith("numpy_"):
            for name in ("key_dim", "value_dim"):
                if (width := getattr(self, name)) != self.d_model:
                    raise disagreement(f"/{name}", f"{self.d_model}, since init {self.init} draws square d_model matrices", str(width))
            if self.bias:
                raise disagreement("/bias", f"false, since init {self.init} has no bias", "true")
        return self

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of every weight. A projection is applied as `x @ W.T + b`, so W is [out, in]."""
        d = self.d_model
        shapes: dict[str, tuple[int, ...]] = {}
        for name, width in zip(PROJECTIONS, (d, self.key_dim, self.value_dim, d), strict=True):
            shapes[f"{name}.weight"] = (d, width)
            if self.bias:
                shapes[f"{name}.bias"] = (d,)
        return shapes

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.weight_shapes().values())


def fingerprint(spec: LayerSpec, weights: Mapping[str, Array]) -> str:
    """SHA-256, in hex, of what the layer computes: the spec without how its weights came about, and the weights themselves.

    The canonical JSON of the spec (sorted keys, no spaces, defaults filled in, less `seed`, `init` and `matmul_precision`); then for each
    weight in order of name a line `name dtype shape\\n` (`query.weight FP32 [64,64]`) and its little-endian row-major bytes.
    """
    document = spec.model_dump(mode="json", exclude={"seed", "init", "matmul_precision"})
    digest = hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())
    for name in sorted(weights):
        array = weights[name]
        shape = json.dumps(list(array.shape), separators=(",", ":"))
        digest.update(f"{name} {datatype_of(array).name} {shape}\n".encode())
        digest.update(raw(array))
    return digest.hexdigest()
