"""What a candidate is looked at for further, if it agrees in the usual calls: each kind of call in a file with a function `look`."""

from attend.check.further import alignment, constructor_options, dropout, gradients, log_sum_exp, other_size, other_values, second, sweeps
from attend.check.further.look import Extent, Look

IN_ORDER = (sweeps, alignment, other_values, log_sum_exp, dropout, gradients, other_size, constructor_options, second)
LOOKS: tuple[Look, ...] = tuple(file.look for file in IN_ORDER)

__all__ = ["LOOKS", "Extent"]
