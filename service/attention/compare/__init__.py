"""Hold someone's own attention against the reference, in every convention in which people write it.

    from service.attention.compare import assert_agrees, compare

    def test_my_attention():
        assert_agrees(MyAttention, mask_means="attend")

    print(compare("my_package:my_kernel", framework="torch", layout="b,n,h,d"))

A target is a `torch.nn.Module` or NumPy class or an instance of one, whose weights are read and given to the reference; or a function of
query, key and value that come split into heads already. `convention.py` says what may be told about it, and what is refused rather than
guessed; `trials.py` what it is asked; `mistakes.py` how a wrong answer is explained. This knows no service, no request and no command
line, and loads torch only where the target is made of it.
"""

from service.attention.compare.comparison import Agreement, CaseResult, Disagreement, assert_agrees, compare, tolerance
from service.attention.compare.convention import Convention

__all__ = ["Agreement", "CaseResult", "Convention", "Disagreement", "assert_agrees", "compare", "tolerance"]
