"""Compares an attention implementation with the reference.

    from service.attention.compare import assert_agrees, compare

    def test_my_attention():
        assert_agrees(MyAttention, mask_means="attend")

    print(compare("my_package:my_kernel", framework="torch", layout="b,n,h,d"))
    print(compare(MyRotaryAttention, spec=LayerSpec(d_model=12, num_heads=3, rope={}), causal=True))

A candidate is a `torch.nn.Module` or NumPy class, or an instance of one, whose weights are read and given to the reference; or a function
of query, key and value that are split into heads already. Torch is used only if it is already imported.

In the order in which to read it:

    comparison.py            `compare`: calls the candidate on every case, and finds the first wrong number
    candidate.py, weights.py constructs a candidate and reads its weights
    adapter.py               calls a candidate
    mistakes.py, changes.py  the known mistakes, and the search for those that explain a result; the changes that mistakes are made of
    cases.py                 the inputs, what the reference computes for them, and the largest error that rounding explains
    convention.py            what parameters and weights mean: by their usual names, or by the options
    random_cases.py          random layers and requests, for comparison with any oracle
"""

from service.attention.compare.cases import tolerance
from service.attention.compare.comparison import CaseResult, Comparison, Disagreement, assert_agrees, compare
from service.attention.compare.convention import Convention

__all__ = ["CaseResult", "Comparison", "Convention", "Disagreement", "assert_agrees", "compare", "tolerance"]
