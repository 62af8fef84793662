"""What a candidate is looked at for further, if it agrees in the usual calls: each kind of call in a file with a function `look`.

In the order in which they are tried, with what they share at the end:

    look.py                  what that is
    sweeps.py                many lengths and widths
    alignment.py             causal calls with more or fewer keys than queries
    other_values.py          parameters whose meaning is unknown
    log_sum_exp.py           log-sum-exps of the rows, which some return
    dropout.py               what calls with dropout show
    gradients.py             gradients of the inputs of torch candidates
    constructor_options.py   parameters of a constructor that are off by default
    other_size.py            a class in other heads and widths
    second.py                two modules of a class, made and called in turn
    side_outputs.py          what is said of numbers besides the output
    backward.py              what gradients are with mistakes in a backward pass
"""

from attend.check.further import alignment, constructor_options, dropout, gradients, log_sum_exp, other_size, other_values, second, sweeps
from attend.check.further.look import Extent, Look

LOOKS: tuple[Look, ...] = (
    sweeps.look,
    alignment.look,
    other_values.look,
    log_sum_exp.look,
    dropout.look,
    gradients.look,
    other_size.look,
    constructor_options.look,
    second.look,
)

__all__ = ["LOOKS", "Extent"]
