"""Mistakes in splitting, merging, choosing and repeating heads."""

from dataclasses import replace

from attend.check.changes import (
    ANY_HEAD_COUNT,
    Impossible,
    all_of,
    change_scale,
    only_if,
    replace_steps,
    share_by_reshape,
    share_by_reshape_after_rope,
    share_with_first_head,
    split_and_merge,
)
from attend.check.computation import Computation
from attend.check.mistakes.mistake import Mistake, attention, computing

ROW = "{x}[b, n, h·d] -> [b, n, h, d] -> [b, h, n, d]"


def exchange_head_sizes(c: Computation) -> Computation:
    """Takes head_dim for the number of heads and the number of heads for head_dim, with the scale as it was."""
    spec = c.spec
    if spec.num_kv_heads != spec.num_heads or spec.head_dim != spec.value_head_dim or spec.positional or spec.qk_norm:
        raise Impossible
    sizes = {"num_heads": spec.head_dim, "num_kv_heads": spec.head_dim, "head_dim": spec.num_heads, "value_head_dim": spec.num_heads}
    return replace(c, spec=spec.model_copy(update=sizes))


MISTAKES: dict[str, dict[str, Mistake]] = {
    "split + merge": {
        "heads attend to each other at every position, since no transpose follows the split (see layout)": Mistake(
            all_of(ANY_HEAD_COUNT, split_and_merge("not transposed")), "x[b, n, h·d] -> [b, n, h, d]: attends over h", ROW.format(x="x")
        ),
        "the first axis is taken for the sequence and the second for the batch (see batch_first)": Mistake(
            split_and_merge("sequence first"), "x[n, b, h·d]", "x[b, n, h·d]"
        ),
    },
    "split + merge + scale": computing(
        "h heads of d numbers",
        {
            "the number of heads and their width are exchanged": ("d heads of h numbers", exchange_head_sizes),
            "the number of heads and their width are exchanged, also in the scale": (
                "d heads of h numbers, / √h",
                all_of(exchange_head_sizes, change_scale(lambda c: c.spec.head_dim**-0.5)),
            ),
        },
    ),
    "split + scale": {
        "there is only one head": Mistake(
            all_of(ANY_HEAD_COUNT, replace_steps(split_heads=lambda layer, x, h: x[:, None]), change_scale(lambda c: c.spec.d_model**-0.5)),
            attention("Q Kᵀ / √d_model") + ", rows of d_model numbers",
            attention() + " for each head",
        )
    },
    "rotary part": {
        f"the rotary part of the keys is not shared across heads, but {words}": Mistake(
            only_if(lambda c: c.spec.latent, change), f"k_rope: {words}", "k_rope: the same in every head"
        )
        for words, change in (
            ("in the first head alone", replace_steps(share=share_with_first_head)),
            ("spread by a reshape without a transpose", replace_steps(share=share_by_reshape)),
            ("spread by a reshape without a transpose, after RoPE", replace_steps(rotate=share_by_reshape_after_rope)),
        )
    },
}
