"""What a candidate is looked at for further, if it agrees in the usual calls: each kind of call in a file with a function `look`."""

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
