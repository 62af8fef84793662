"""Compares an attention implementation with the reference.

    from attend.check import assert_agrees, compare

    def test_my_attention():
        assert_agrees(MyAttention)

    print(compare("my_package:my_kernel", mask_means="attend"))
    print(compare(MyRotaryAttention, spec=LayerSpec(d_model=12, num_heads=3, rope={})))

A candidate is a `torch.nn.Module` or NumPy class, or an instance of one, whose weights are read and given to the reference; or a function
of query, key and value that are split into heads already. Torch is used only if it is already imported.

In the order in which to read it:

    comparison.py            `compare`: calls the candidate, and says what was looked at
    alternatives.py          what a wrong one may be meant to be
    disagreements.py         what is said of it
    report.py                what it found, and how that is written
    further/                 what one that agrees is looked at for further: lengths, alignment, gradients, …
    digits.py                whether it has the digits of float32 alone
    calls.py                 calls the candidate on every case, and compares the numbers
    candidate.py             a candidate, and the cases that it is called on
    preparation.py           makes it of a class, an instance or a function, which loading.py finds by name
    constructor.py           constructs a class
    weights.py               reads its weights
    adapter.py               calls a candidate
    arguments.py             makes the arguments of these calls
    called.py                the function that it is called by, and what its parameters mean
    packed.py                several arrays that it takes in one
    rope_tables.py           cosines and sines that it takes
    pages.py                 pages of keys and values that it takes
    arrays.py                arrays of its framework, and back to NumPy
    families.py              the layer of a family of models
    signatures.py            functions whose parameters and conventions are known
    tried.py                 finds by calls what names and options leave open
    readings.py              axes, packing and causality, by calls under the conventions that people have
    positions.py             where queries and keys are, in the same way
    trial.py                 the candidate under one convention after the other
    requirements.py          a dtype, a width of heads and tiles of rows that it takes alone
    mask_meaning.py          the meaning of masks, in the same way
    sizes.py                 the candidate in other sizes, in which a mistake has to hold before it is named
    trace.py                 the arrays that a candidate makes, with the lines of its source
    divergence.py            the first step of the reference whose numbers are not among them
    explanation.py           the search for the mistake that explains a candidate's numbers
    unnamed.py               what is said if there is none
    applied_weights.py       the attention weights that a candidate applies, found by calls
    compared_weights.py      these beside the right ones
    weight_facts.py          what they show: which keys get weight, in which order, and what rows sum to
    score_facts.py           what is wrong with the scores that they come from
    pairs.py                 words for sets of queries and keys
    mistakes/                the known mistakes with their arithmetic
    algebra/                 the changes of any step of any layer, with names and arithmetic made of the step
    fitting.py               constant factors, fitted to the candidate's numbers
    changes.py               what mistakes are made of
    cases.py                 the inputs
    groups.py                calls with heads that share a key and a value
    spread.py                how far outputs in half precision may be from the reference
    lengths.py               further calls of many lengths, widths and positions, if those agree
    parameters.py            cases that pass each parameter a value that changes the result
    computation.py           what the reference computes for them, with mistakes too, and the largest error that rounding explains
    rounded_steps.py         which steps a candidate in half precision rounds
    chunks.py                the same in several calls, as a candidate with a cache computes
    low_precision.py         the same with some steps in fewer digits
    convention.py            what parameters and weights mean: by their usual names, or by the options
    random_cases.py          random layers and requests, for comparison with any oracle
    rounding.py              the largest error that the roundings of a half-precision layer explain
"""

from attend.check.calls import CaseResult
from attend.check.comparison import assert_agrees, compare
from attend.check.computation import tolerance
from attend.check.convention import Convention
from attend.check.loading import NoSuchCandidate
from attend.check.report import Comparison, Disagreement

__all__ = ["CaseResult", "Comparison", "Convention", "Disagreement", "NoSuchCandidate", "assert_agrees", "compare", "tolerance"]
