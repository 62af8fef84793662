"""What `attend demo` says of heads by their shares."""

import numpy as np

from attend.cli.head_roles import ROLES, SEVERAL, measured_roles


def test_a_head_has_the_role_with_most_of_its_weight_if_that_is_half() -> None:
    shares = {
        "previous_token_score": np.array([0.31, 0.50, 0.49, 0.01]),
        "first_key_mass": np.array([0.69, 0.20, 0.49, 0.02]),
        "induction_score": np.array([0.70, np.nan, np.nan, np.nan]),
    }
    assert measured_roles(shares) == [
        f"{ROLES['induction_score']}: 0.70",
        f"{ROLES['previous_token_score']}: 0.50",
        SEVERAL,
        SEVERAL,
    ]
