"""How far an answer is from the reference, and how far it may be before that is no rounding any more.

float64 layers: 1e-10 · max(1, max|x|). float32 layers: 1e-5 · max(1, max|scores|) · max|x|, since the softmax turns an absolute error of a
score into a relative one of a weight; the scores themselves, and what is logarithmic in them, 1e-5 · max(1, max|scores|). max|scores| is
taken before anything is blocked: what rounding costs is decided there. Knows arrays alone; loads no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from service.attention.random_cases import Case
from service.attention.reference.forward import Reference
from service.tensors import Array
from service.wire.schemas.attend import Output

OUTPUTS: tuple[str, ...] = tuple(name for name in get_args(Output) if not name.endswith("_gradient"))
RELATIVE = {"float64": 1e-10, "float32": 1e-5}
LOGARITHMIC = {"scores", "log_sum_exp"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The largest error of one output of one case. `about` says what is wrong where that is no number."""

    name: str
    error: float
    allowed: float
    about: str = ""

    @property
    def agrees(self) -> bool:
        return self.error <= self.allowed

    @property
    def share(self) -> float:
        """Of what is allowed; 1 is the most that is."""
        return 0.0 if self.error == 0 else np.inf if self.allowed == 0 else self.error / self.allowed


def wrong(name: str, about: str) -> Finding:
    """A finding that is no matter of rounding."""
    return Finding(name, np.inf, 0.0, about)


def findings(case: Case, reference: Reference, answer: Mapping[str, Any], fully_masked_rows: int) -> list[Finding]:
    """Every output of a case against the reference."""
    largest = largest_score(case, reference)
    found = [finding(name, np.asarray(getattr(reference, name)), answer.get(name), case.spec.dtype, largest) for name in OUTPUTS]
    if fully_masked_rows != reference.fully_masked_rows:
        found.append(wrong("fully_masked_rows", f"{fully_masked_rows}, expected {reference.fully_masked_rows}"))
    return found


def finding(name: str, expected: Array, got: Array | None, dtype: str, largest: float) -> Finding:
    """One output against what it should be; `largest` is the largest score of the call."""
    if got is None:
        return wrong(name, "missing")
    if got.shape != expected.shape:
        return wrong(name, f"shape {list(got.shape)}, expected {list(expected.shape)}")
    got = got.astype(np.float64)
    finite = np.isfinite(expected)
    if not np.array_equal(got[~finite], expected[~finite]):  # -inf is exact
        return wrong(name, "finite where -inf is expected")
    size = float(np.abs(expected[finite]).max(initial=0.0))
    if dtype == "float64":
        allowed = RELATIVE[dtype] * max(1.0, size)
    else:
        allowed = RELATIVE[dtype] * max(1.0, largest) * (1.0 if name in LOGARITHMIC else size)
    error = float(np.abs(got[finite] - expected[finite]).max(initial=0.0))
    return Finding(name, error, allowed) if np.isfinite(error) else wrong(name, "NaN or infinity")


def largest_score(case: Case, reference: Reference) -> float:
    """max|scores| before anything is capped, added or blocked."""
    scale = case.request.get("scale")
    keys = np.repeat(reference.key_projection, case.spec.num_heads // case.spec.num_kv_heads, axis=-3)
    products = reference.query_projection @ keys.swapaxes(-1, -2)
    return abs(case.spec.scale if scale is None else float(scale)) * float(np.abs(products).max(initial=0.0))
