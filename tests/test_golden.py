"""Cases computed by other libraries, replayed over HTTP."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

CASES = sorted((Path(__file__).parent / "golden").glob("*.json"))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_golden_case(http: httpx.Client, path: Path) -> None:
    """Create the layer over HTTP; every expected output agrees within the case's absolute tolerance."""
    case: dict[str, Any] = json.loads(path.read_text())
    made = http.put("/layers/golden", json={"spec": case["layer"], "weights": case["weights"]})
    assert made.is_success, made.text

    reply = http.post("/attend", json={"layer": "golden", **case["request"], "outputs": list(case["expect"])})

    assert reply.status_code == 200, reply.text
    for name, expected in case["expect"].items():
        np.testing.assert_allclose(np.array(reply.json()[name]), np.array(expected), rtol=0, atol=case["tolerance"])


def test_there_are_golden_cases() -> None:
    """Without cases, the test above would pass."""
    assert len(CASES) >= 6
