"""What heads do with a text, by shares of their weight: the roles that research on heads has names for."""

from collections.abc import Mapping

import numpy as np

from attend.tensors import Array

ROLES = {  # metric of a head -> what it says of it
    "previous_token_score": "attends to the token before",
    "duplicate_token_score": "attends to the same token earlier (a duplicate-token head)",
    "induction_score": "attends to what followed the same token earlier (an induction head)",
    "first_key_mass": "rests on the first token",
}
SEVERAL = "does several things"
LEAST_SHARE = 0.5  # of a head's weight, for a role


def measured_roles(metrics: Mapping[str, Array]) -> list[str]:
    """What each head does by its metrics of ROLES, [h] each: the role with the largest share, if that is half of its weight or more.

    A metric that is not there, or NaN where no token is repeated, is no role.
    """
    known = [name for name in ROLES if name in metrics]
    shares = np.nan_to_num(np.array([metrics[name] for name in known]))
    found = []
    for head, best in enumerate(shares.argmax(0)):
        share = shares[best, head]
        found.append(f"{ROLES[known[best]]}: {share:.2f}" if share >= LEAST_SHARE else SEVERAL)
    return found
