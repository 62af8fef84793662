"""Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, equations 9 to 17): projections in two steps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from attend.attention.operators.declarations import Variances, variance
from attend.attention.operators.operator import Operator
from attend.attention.operators.projection import product_formula, split, written_heads
from attend.attention.operators.qk_norm import QKNorm, normalise
from attend.attention.operators.rope import shares_rotary_key
from attend.attention.operators.step import Step, Steps, Value
from attend.spec_parts import Eps, Flag, Part, Width, field_error

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from attend.attention.operators.declarations import Axes, Shapes
    from attend.attention.operators.operator import Draw, Fields, Misfit
    from attend.attention.operators.step import Arithmetic
    from attend.spec_parts import Dimensions
    from attend.tensors import Array


EXACT_QUERY_LATENT = "exact_query_latent"  # the value from which an indexer's queries are projected


class Latent(Part):
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434): projections in two steps, and a part of the keys that heads share.

    Keys and values: c = norm(x W^T) with the weight `key_value_down.weight` [key_value_rank, key_dim]; `key.weight` and `value.weight` are
    applied to c. Queries likewise with `query_down.weight`, or in one step. The first `rope_key_dim` numbers of each key are the same for
    all heads, x W^T with `rope_key.weight` [rope_key_dim, key_dim], so `key.weight` has that many fewer rows for each head.
    """

    key_value_rank: Width = Field(examples=[16], description="Width of the latent vector of keys and values.")
    query_rank: Width | None = Field(default=None, description="Width of the latent vector of queries; null if they have none.")
    rope_key_dim: Width = Field(
        examples=[4], description="Number of dimensions of each key that all heads share; RoPE rotates the first ones."
    )
    eps: Eps = Field(default=1e-6, description="Of the RMS norms of the latent vectors.")
    bias: Flag = Field(default=False, description="Whether query_down, key_value_down and rope_key have biases.")


class LatentOperator(Operator):
    name, field, needs_projections = "latent", "latent", True
    equal_inputs = True
    matrices = ("query_down", "key_value_down", "rope_key")
    axes: ClassVar[Axes] = {
        **{f"{name}.weight": ("out", "in") for name in ("key_value_down", "query_down", "rope_key")},
        **{f"{name}.bias": ("n",) for name in ("key_value_down", "query_down", "rope_key")},
        **dict.fromkeys(("key_value_down_norm.weight", "query_down_norm.weight"), ("n",)),
    }
    identifying_weight = "key_value_down.weight"

    @classmethod
    def fill_in(cls, fields: Fields, width: int) -> None:
        """Keys and values have the same width."""
        if fields.get(cls.field):
            fields.setdefault("value_dim", fields.setdefault("key_dim", fields.get("value_dim", fields["d_model"])))

    @classmethod
    def check(cls, spec: Dimensions) -> None:
        latent: Latent = getattr(spec, cls.field)
        if latent.rope_key_dim >= spec.head_dim:
            raise field_error("/latent/rope_key_dim", f"less than head_dim {spec.head_dim}", str(latent.rope_key_dim))
        if spec.value_dim != spec.key_dim:
            expected = f"{spec.key_dim}, the key_dim, since latent projects keys and values by one matrix, key_value_down.weight"
            raise field_error("/value_dim", expected, str(spec.value_dim))

    @classmethod
    def weights(cls, spec: Dimensions) -> Shapes:
        """The first step: its matrices, biases and norms. The second step has fewer inputs, and fewer rows of keys."""
        latent: Latent = getattr(spec, cls.field)
        down = {"key_value_down": (latent.key_value_rank, spec.key_dim), "rope_key": (latent.rope_key_dim, spec.key_dim)}
        down |= {"query_down": (latent.query_rank, spec.d_model)} if latent.query_rank else {}
        shapes: Shapes = {f"{name}.weight": shape for name, shape in down.items()}
        if latent.bias:
            shapes |= {f"{name}.bias": shape[:1] for name, shape in down.items()}
        shapes |= {f"{name}_norm.weight": shape[:1] for name, shape in down.items() if name != "rope_key"}
        key_rows = spec.num_kv_heads * (spec.head_dim - latent.rope_key_dim)
        shapes["query.weight"] = (spec.num_heads * spec.head_dim, latent.query_rank or spec.d_model)
        shapes["key.weight"] = (key_rows, latent.key_value_rank)
        shapes["value.weight"] = (spec.num_kv_heads * spec.value_head_dim, latent.key_value_rank)
        return shapes | ({"key.bias": (key_rows,)} if spec.has_bias("key") else {})

    @classmethod
    def infer_fields(cls, weights: Mapping[str, Array], num_heads: int, misfit: Misfit) -> Fields:
        """Ranks and widths; inputs are those of the first step of a projection."""
        down, head_dim = weights["key_value_down.weight"], len(weights["query.weight"]) // num_heads
        if (shared := weights.get("rope_key.weight")) is None or not 0 < len(shared) < head_dim:
            raise misfit("rope_key.weight", f"1 to {head_dim - 1} rows, for heads of {head_dim} numbers")
        query_down = weights.get("query_down.weight")
        ranks = {"query_rank": None if query_down is None else len(query_down), "key_value_rank": len(down), "rope_key_dim": len(shared)}
        query_width = (weights["query.weight"] if query_down is None else query_down).shape[1]
        inputs = {"d_model": query_width, "key_dim": down.shape[1], "value_dim": down.shape[1]}
        return {cls.field: {**ranks, "bias": "key_value_down.bias" in weights}, **inputs}

    @classmethod
    def shared_key_dim(cls, value: Mapping[str, Any]) -> int:
        return int(value["rope_key_dim"])

    @classmethod
    def widest(cls, spec: Dimensions) -> int:
        latent: Latent = getattr(spec, cls.field)
        return max(latent.key_value_rank, latent.query_rank or 1)

    @classmethod
    def variances(cls, spec: Dimensions, weights: Mapping[str, Tensor], before: Variances) -> Variances:
        """A share of each key is the part that all heads have."""
        share = getattr(spec, cls.field).rope_key_dim / spec.head_dim
        return before._replace(key=before.key + (variance(weights, "rope_key") - before.key) * share)

    @classmethod
    def random(cls, draw: Draw, fields: Fields) -> Any:
        """Ranks that no other axis has."""
        ranks = {"query_rank": 11 if draw.flag() else None, "key_value_rank": 13}
        ranks["rope_key_dim"] = draw.integer(1, fields.get("head_dim", fields["d_model"] // fields["num_heads"]))
        return {**ranks, "bias": draw.flag(), "eps": draw.one_of(1e-6, 0.1)}

    @classmethod
    def steps(cls, spec: Dimensions, features: Collection[str] = ()) -> Steps:
        """Latent vectors, and queries, keys and values of them.

        If what heads share is rotated by itself, keys and values come after RoPE, and a cache keeps what they are made of, which is
        smaller.
        """
        latent: Latent = getattr(spec, cls.field)
        down = (*_query_steps(spec, latent, features), _compress(latent, "key", "latent", "c"), _rope_key(latent))
        source = "latent"
        if "values" in features:
            source = "value_latent"
            down = (*down, _compress(latent, "value", source, "c^V"))
        expands = shares_rotary_key(spec) and "joined_keys" not in features
        up = (_key_step(spec, expands=expands), _value_step(spec, source, expands=expands))
        return {"project": down, "expand": up} if expands else {"project": (*down, *up)}


def _query_steps(spec: Dimensions, latent: Latent, features: Collection[str]) -> tuple[Step, ...]:
    """q = W_UQ c^Q with c^Q = norm(W_DQ h) (equations 12 and 13), or W_Q h.

    If an indexer selects keys, it needs c^Q in float64, of which that of the queries is rounded.
    """
    steps: tuple[Step, ...] = ()
    rank, x, source, name = "query_dim", "x", "query", "Q"
    if latent.query_rank:
        rank, x, source, name = "query_rank", "c^Q", "query_latent", "UQ"
        steps = (_compress(latent, "query", source, x),)
        if getattr(spec, "indexer", None):
            exact = _compress(latent, "query", EXACT_QUERY_LATENT, x, exact=True)
            formula = "c^Q = c^Q in the layer's datatype"
            rounded = Step("compress_query", (EXACT_QUERY_LATENT,), steps[0].writes, formula, lambda m, exact: m.narrow(exact))
            steps = (exact, *(steps if "all_selected" in features else (rounded,)))
    formula = f"Q = split({product_formula(spec, 'query', x, name)}, {spec.num_heads} heads)"
    compute = partial(split, name="query", heads=spec.num_heads)
    products = (f"b,h,q,head_dim,{rank}",)
    return (*steps, Step("project_query", (source,), written_heads("query"), formula, compute, products=products))


def _compress(latent: Latent, source: str, written: str, symbol: str, *, exact: bool = False) -> Step:
    """The latent vectors norm(W_D h) of queries (equation 12), or of keys or values (equation 9); `exact`: in float64."""
    if source == "query":
        weight, axes, width, x, name = "query_down", "b,q,query_rank", "query_dim", "x", "DQ"
    else:
        weight, axes, width, x, name = "key_value_down", "b,k,key_value_rank", "key_dim", "z", "DKV"
    return Step(
        f"compress_{source}{'_exactly' if exact else ''}",
        (source,),
        {written: Value(axes, "float64" if exact else "")},
        f"{symbol} = RMSNorm({x} {_matrix(latent, name)})",
        partial(_latent_vectors, weight=weight, norm=QKNorm(eps=latent.eps), exact=exact),
        products=(f"{axes},{width}",),
        scratch=(f"{axes.rpartition(',')[0]},{width}", axes) if exact else (),
    )


def _rope_key(latent: Latent) -> Step:
    """The part of keys that all heads share, W_KR h (equation 15, before RoPE)."""
    return Step(
        "project_rope_key",
        ("key",),
        {"rope_key": Value("b,k,rope_key_dim")},
        f"K^R = z {_matrix(latent, 'KR')}",
        lambda m, key: m.project(key, "rope_key"),
        products=("b,k,rope_key_dim,key_dim",),
    )


def _matrix(latent: Latent, name: str) -> str:
    """`W_DQ`, or `W_DQ + b_DQ` with biases."""
    return f"W_{name} + b_{name}" if latent.bias else f"W_{name}"


def _key_step(spec: Dimensions, *, expands: bool) -> Step:
    """k = [k^R; W_UK c] (equations 10 and 17, where what heads share comes last)."""
    return Step(
        "project_key",
        ("latent", "rope_key"),
        written_heads("key"),
        f"K = [K^R, {product_formula(spec, 'key', 'c', 'UK')}], K^R the same in every head",
        partial(_keys, heads=spec.num_kv_heads),
        products=("b,kv heads,k,head_dim - rope_key_dim,key_value_rank",),
        expands=expands,
    )


def _value_step(spec: Dimensions, source: str, *, expands: bool) -> Step:
    """v = W_UV c (equation 11)."""
    return Step(
        "project_value",
        (source,),
        written_heads("value"),
        f"V = split({product_formula(spec, 'value', 'c', 'UV')}, {spec.num_kv_heads} heads)",
        partial(split, name="value", heads=spec.num_kv_heads),
        products=("b,kv heads,k,value_head_dim,key_value_rank",),
        expands=expands,
    )


def _latent_vectors(m: Arithmetic, x: Any, *, weight: str, norm: QKNorm, exact: bool) -> Any:
    """[b, n, in] -> [b, n, rank]."""
    down = m.project_exactly(m.exact(x), weight) if exact else m.project(x, weight)
    return normalise(m, down, norm=norm, name=f"{weight}_norm")


def _keys(m: Arithmetic, latent: Any, rope_key: Any, *, heads: int) -> Any:
    """Every head's key after the part [b, k, r] that all heads share: [b, kv heads, k, head_dim]."""
    key = m.split_heads(m.project(latent, "key"), heads)
    return m.xp.concatenate((m.share(rope_key, heads), key), axis=-1)
