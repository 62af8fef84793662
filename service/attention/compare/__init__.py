"""Compares an attention implementation with the reference.

    from service.attention.compare import assert_agrees, compare

    def test_my_attention():
        assert_agrees(MyAttention, mask_means="attend")

    print(compare("my_package:my_kernel", framework="torch", layout="b,n,h,d"))
    print(compare(MyRotaryAttention, spec=LayerSpec(d_model=12, num_heads=3, rope={}), causal=True))

A candidate is a `torch.nn.Module` or NumPy class, or an instance of one, whose weights are read and given to the reference; or a function
of query, key and value that are split into heads already. `convention.py` has the options, `names.py` the names that are known,
`cases.py` the inputs, `mistakes.py` the explanations. Torch is used only if it is already imported.
"""

from service.attention.compare.comparison import CaseResult, Comparison, Disagreement, assert_agrees, compare
from service.attention.compare.convention import Convention
from service.attention.compare.tolerance import tolerance

__all__ = ["CaseResult", "Comparison", "Convention", "Disagreement", "assert_agrees", "compare", "tolerance"]
