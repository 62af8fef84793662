"""Selects the keys of each query by index scores (DeepSeek-AI 2025, "DeepSeek-V3.2", equations 1 and 2).

    I_ij = Σ_h w_ih · relu(q_ih · k_j)        over the small heads h of the indexer, which share their keys

Of the keys that a query may attend to, those with the `top_k` largest index scores are kept; ties go to the lower key. The models' factors
1/√head_dim and 1/√num_heads change no order and are left out. A rounding error could choose another key, so all of this is computed in
float64 from the inputs, whatever the layer's dtype: which keys are selected does not depend on the batch that a call is in.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from attend.attention.operators.latent import EXACT_QUERY_LATENT
from attend.attention.operators.operator import Operator
from attend.attention.operators.qk_norm import QKNorm, normalise
from attend.attention.operators.rope import Rope, frequencies, rotate
from attend.attention.operators.step import VISIBLE, Step, Steps, Value
from attend.spec_parts import Eps, Flag, Part, Width, field_error

if TYPE_CHECKING:
    from collections.abc import Collection

    from attend.attention.operators.declarations import Axes, Shapes
    from attend.attention.operators.latent import Latent
    from attend.attention.operators.operator import Draw, Fields
    from attend.attention.operators.step import Arithmetic
    from attend.spec_parts import Dimensions

QUERY_AXES, KEY_AXES = "b,index_heads,q,index_head_dim", "b,k,index_head_dim"


class Indexer(Part):
    """DeepSeek's indexer (DeepSeek-AI 2025, arXiv 2512.02556): a query attends only to the keys with its `top_k` largest index scores.

    I_ij = sum_h w_ih relu(q_ih · k_j) over small heads of its own. Queries are x W^T with `index_query.weight` [num_heads * head_dim, in],
    from the latent vector of queries if there is one; keys, the same for all of these heads, norm(x W^T) with `index_key.weight` [head_dim,
    key_dim] and a layer norm, `index_key_norm.weight` and `.bias`; w is x W^T with `index_head_weights.weight` [num_heads, d_model]. RoPE
    rotates these queries and keys as those of the layer.
    """

    num_heads: Width = Field(description="Number of heads of the indexer.")
    head_dim: Width = Field(description="Width of its heads.")
    top_k: Width = Field(description="Number of keys that each query keeps.")
    interleaved: Flag = Field(default=False, description="Whether RoPE rotates interleaved pairs here (GLM-5), or halves (DeepSeek-V3.2).")
    eps: Eps = Field(default=1e-6, description="Of the layer norm of its keys.")

    @property
    def index_heads(self) -> int:
        """Number of its heads, under a name that no other number has."""
        return self.num_heads

    @property
    def index_head_dim(self) -> int:
        """Width of its heads, likewise."""
        return self.head_dim


class IndexerOperator(Operator):
    name, field, needs_projections = "indexer", "indexer", True
    matrices = ("index_query", "index_key", "index_head_weights")
    axes: ClassVar[Axes] = {
        **{f"{name}.weight": ("out", "in") for name in ("index_key", "index_query", "index_head_weights")},
        **dict.fromkeys(("index_key_norm.weight", "index_key_norm.bias"), ("n",)),
    }
    identifying_weight = "index_key.weight"
    same_keys_for_all_heads = True

    @classmethod
    def check(cls, spec: Dimensions) -> None:
        indexer, rope = getattr(spec, cls.field), getattr(spec, "rope", None)
        if rope and (dims := rope.dims or 0) > indexer.head_dim:
            raise field_error("/indexer/head_dim", f"at least {dims}, which RoPE rotates", str(indexer.head_dim))

    @classmethod
    def weights(cls, spec: Dimensions) -> Shapes:
        indexer, latent = getattr(spec, cls.field), getattr(spec, "latent", None)
        query_width = (latent and latent.query_rank) or spec.d_model
        return {
            "index_query.weight": (indexer.num_heads * indexer.head_dim, query_width),
            "index_key.weight": (indexer.head_dim, spec.key_dim),
            "index_key_norm.weight": (indexer.head_dim,),
            "index_key_norm.bias": (indexer.head_dim,),
            "index_head_weights.weight": (indexer.num_heads, spec.d_model),
        }

    @classmethod
    def widest(cls, spec: Dimensions) -> int:
        indexer: Indexer = getattr(spec, cls.field)
        return indexer.num_heads * indexer.head_dim

    @classmethod
    def random(cls, draw: Draw, fields: Fields) -> Any:
        """Fewer keys than most calls have."""
        dims = (fields.get("rope") or {}).get("dims", fields.get("head_dim", fields["d_model"] // fields["num_heads"]))
        indexer = {"num_heads": draw.integer(1, 4), "head_dim": dims + draw.integer(1, 4), "top_k": draw.integer(1, 8)}
        return {**indexer, "interleaved": draw.flag(), "eps": draw.one_of(1e-6, 0.1)}

    @classmethod
    def implied_features(cls, spec: Dimensions, num_keys: int) -> frozenset[str]:
        """Of no more than `top_k` keys, all are selected."""
        return frozenset({"all_selected"} if num_keys <= getattr(spec, cls.field).top_k else ())

    @classmethod
    def steps(cls, spec: Dimensions, features: Collection[str] = ()) -> Steps:
        """Queries, factors and keys of the indexer, which a cache keeps, and the selection. All of it is in float64."""
        indexer: Indexer = getattr(spec, cls.field)
        rope, constants = getattr(spec, "rope", None), tuple[Step, ...]()
        if rope:
            rope = rope.model_copy(update={"interleaved": indexer.interleaved})
            numbers = frequencies(rope, rope.dims or indexer.head_dim)
            constants = (
                Step("index_frequencies", (), {"index_frequencies": Value("dims / 2", "float64")}, "", lambda m: m.constant(numbers)),
            )
        mask = Step("indexer_mask", ("visible", "keys"), {"indexer_mask": Value("b,q,k", "bool")}, "", _mask)
        select = () if "all_selected" in features else (_selection(indexer),)
        return {
            "constants": constants,
            "norm": (_query_step(spec, indexer, rope), FACTORS, _key_step(indexer, rope)),
            "select": (*select, mask),
        }


def _query_step(spec: Dimensions, indexer: Indexer, rope: Rope | None) -> Step:
    """The queries of its heads, of the latent vector of queries if there is one."""
    latent: Latent | None = getattr(spec, "latent", None)
    compressed = latent is not None and latent.query_rank is not None
    source, x, width = (EXACT_QUERY_LATENT, "c^Q", "query_rank") if compressed else ("query", "x", "query_dim")
    return Step(
        "index_query",
        (source, *_positions("query", rope)),
        {"index_query": Value(QUERY_AXES, "float64")},
        f"q = {'R(i) ' if rope else ''}split({x} W_IQ)",
        partial(_queries, indexer=indexer, rope=rope),
        products=(f"{QUERY_AXES},{width}",),
        scratch=(f"b,q,{width}", QUERY_AXES, QUERY_AXES),
    )


def _key_step(indexer: Indexer, rope: Rope | None) -> Step:
    """The keys, which its heads share."""
    return Step(
        "index_key",
        ("key", *_positions("key", rope)),
        {"index_key": Value(KEY_AXES, "float64")},
        f"k = {'R(j) ' if rope else ''}LayerNorm(z W_IK)",
        partial(_keys, indexer=indexer, rope=rope),
        products=(f"{KEY_AXES},key_dim",),
        scratch=("b,k,key_dim", KEY_AXES, KEY_AXES),
    )


def _positions(role: str, rope: Rope | None) -> tuple[str, ...]:
    """The values by which RoPE rotates queries or keys."""
    return (f"{role}_coordinates", "index_frequencies") if rope else ()


FACTORS = Step(
    "index_factors",
    ("query",),
    {"index_factors": Value("b,q,index_heads", "float64")},
    "w = x W_w",
    lambda m, query: m.project_exactly(m.exact(query), "index_head_weights"),
    products=("b,q,index_heads,query_dim",),
)


def _selection(indexer: Indexer) -> Step:
    """Equations 1 and 2."""
    return Step(
        "select",
        ("index_query", "index_key", "index_factors", "visible"),
        VISIBLE,
        f"j is visible to i if it is among the {indexer.top_k} visible keys with the largest I_ij = Σ_h w_ih relu(q_ih · k_j)",
        partial(_select, top_k=indexer.top_k),
        all_keys=True,
        products=("b,index_heads,q,k,index_head_dim", "b,q,k,index_heads"),
        scratch=("b,index_heads,q,k", "b,index_heads,q,k", "b,q,k"),
    )


def _queries(m: Arithmetic, x: Any, *angles: Any, indexer: Indexer, rope: Rope | None) -> Any:
    """[b, q, in] -> [b, heads, q, head_dim]; `angles`: the coordinates and the frequencies of RoPE."""
    query = m.split_heads(m.project_exactly(m.exact(x), "index_query"), indexer.num_heads)
    return rotate(m, query, *angles, rope=rope) if rope else query


def _keys(m: Arithmetic, key: Any, *angles: Any, indexer: Indexer, rope: Rope | None) -> Any:
    """[b, k, key_dim] -> [b, k, head_dim]."""
    norm = QKNorm(kind="layer", eps=indexer.eps)
    key = normalise(m, m.project_exactly(m.exact(key), "index_key"), norm=norm, name="index_key_norm")
    return rotate(m, key[:, None], *angles, rope=rope)[:, 0] if rope else key


def _select(m: Arithmetic, query: Any, key: Any, factors: Any, visible: Any, *, top_k: int) -> Any:
    """Whether a key is visible and among the `top_k` visible ones with the largest index scores: bool [b, 1, q, k]."""
    return visible if key.shape[1] <= top_k else m.select_by_index(query, key, factors, visible, top_k)


def _mask(m: Arithmetic, visible: Any, keys: Any) -> Any:
    """The same for all heads: [b, h|1, q|1, k|1] -> [b, q|1, k]."""
    return m.xp.broadcast_to(visible[:, 0], (*visible.shape[:1], *visible.shape[2:3], len(keys)))
