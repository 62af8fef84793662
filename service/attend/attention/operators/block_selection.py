"""Mixture of block attention (Lu et al. 2025, arXiv 2502.13189): each head of a query attends to the blocks of keys that resemble it most.

    g_ic = q_i · mean(k_j of block c)        block c: the keys j with ⌊j / block_size⌋ = c

A query attends to keys of its own block, and of the `top_k` - 1 earlier blocks with the largest g; ties go to the earlier block. Queries
and keys are those of the scores, after RoPE. A rounding error could choose another block, so the means and products are in float64.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from attend.attention.operators.declarations import LeftOut
from attend.attention.operators.operator import Operator
from attend.attention.operators.step import VISIBLE, Step, Steps, Value
from attend.spec_parts import Part, Width

if TYPE_CHECKING:
    from collections.abc import Collection

    from attend.attention.operators.operator import Draw, Fields
    from attend.attention.operators.step import Arithmetic
    from attend.spec_parts import Dimensions


class BlockSelection(Part):
    """Mixture of block attention (Lu et al. 2025, arXiv 2502.13189): each head of a query chooses blocks of keys.

    It attends to its own block, and to the earlier blocks whose mean key has the largest product with the query.
    """

    block_size: Width = Field(examples=[512], description="Number of keys of a block.")
    top_k: Width = Field(examples=[3], description="Number of blocks that each query attends to, its own included.")


class BlockSelectionOperator(Operator):
    name, field, positional = "block_selection", "block_selection", True
    amplifies_rounding = True  # of the projections, which may choose another block
    conflicts: ClassVar[dict[str, str]] = {"differential": "a head selects blocks by one query, of which differential attention has two"}
    left_out = LeftOut(
        "the selection of blocks", "all keys (that no mask blocks) are seen", "keys of blocks that are not selected are blocked"
    )

    @classmethod
    def is_relative(cls, spec: Dimensions) -> bool:
        """Where a block begins depends on the position itself."""
        return False

    @classmethod
    def steps(cls, spec: Dimensions, features: Collection[str] = ()) -> Steps:
        """The mean key of each block, which is computed of all keys of a cache, and the selection."""
        blocks: BlockSelection = getattr(spec, cls.field)
        means = Step(
            "block_means",
            ("key_projection",),
            {"block_means": Value("b,kv heads,k / block_size,head_dim", "float64")},
            f"M_c = mean of K_j over the block ⌊j / {blocks.block_size}⌋ = c",
            partial(_means, size=blocks.block_size),
            all_keys=True,
            scratch=("b,kv heads,k,head_dim",),
            expands=True,
        )
        earlier = f", or among the {blocks.top_k - 1} earlier ones with the largest Q_i · M_c" if blocks.top_k > 1 else ""
        select = Step(
            "select_blocks",
            ("query_projection", "block_means", "positions", "keys", "visible"),
            VISIBLE,
            f"j is visible to i if its block is that of i{earlier}",
            partial(_select, blocks=blocks),
            all_keys=True,
            products=("b,h,q,k / block_size,head_dim",),
            scratch=("b,h,q,k / block_size",) * 2,
            empties=True,
        )
        return {"rescale": (means,), "select": (select,)}

    @classmethod
    def random(cls, draw: Draw, fields: Fields) -> Any:
        """Blocks of fewer keys than most calls have."""
        return {"block_size": draw.integer(1, 4), "top_k": draw.integer(1, 3)}


def _means(m: Arithmetic, key: Any, *, size: int) -> Any:
    """[b, kv heads, k, d] -> [b, kv heads, blocks, d]. A masked key may have numbers that are infinite or NaN, and then counts as 0."""
    key = m.exact(key)
    key, complete = m.where(m.xp.isfinite(key).all(axis=-1)[..., None], key, 0), key.shape[2] // size
    means = key[:, :, : complete * size].reshape(*key.shape[:2], complete, size, key.shape[3]).mean(axis=3)
    incomplete = key[:, :, complete * size :]
    return m.xp.concatenate((means, incomplete.mean(axis=2, keepdims=True)), axis=2) if incomplete.shape[2] else means


def _select(m: Arithmetic, query: Any, means: Any, positions: Any, keys: Any, visible: Any, *, blocks: BlockSelection) -> Any:
    """Whether a key is visible and in a selected block: bool [b, h, q, k]."""
    count = means.shape[2]
    grouped = m.exact(query).reshape(len(query), means.shape[1], -1, query.shape[3]) @ means.mT
    index = m.counting(count, keys)
    earlier = index < m.xp.floor_divide(positions, blocks.block_size)[:, None, :, None]
    scores = m.where(earlier, grouped.reshape(*query.shape[:3], count), float("-inf"))
    current = index == m.xp.floor_divide(positions, blocks.block_size)[:, None, :, None]
    chosen = m.largest(scores, min(blocks.top_k - 1, count)) & earlier | current
    return visible & m.gather(chosen, (keys // blocks.block_size)[None, None, None])
