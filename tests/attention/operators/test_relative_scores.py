"""Layers with `relative_scores` over HTTP against the float64 reference: every length and distance."""

from typing import Any

import numpy as np
import pytest

from attend.check.random_cases import Case
from attend.client import Client
from attend.spec import LayerSpec
from support.operator_cases import LAYER, agree, put

XL: dict[str, Any] = {"kind": "transformer_xl"}
BUCKETS: dict[str, Any] = {"kind": "disentangled", "max_distance": 90, "buckets": 8, "position_to_content": True}


def drawn(relative: dict[str, Any], queries: int, keys: int, offset: Any = "end", **fields: Any) -> Case:
    """A case of two items, with unequal numbers of heads and sizes."""
    rng = np.random.default_rng(queries)
    spec = LayerSpec.model_validate({"d_model": 14, "num_heads": 6, "num_kv_heads": 2, "head_dim": 5, "relative_scores": relative} | fields)
    weights = {name: rng.standard_normal(shape) * 0.4 for name, shape in spec.weight_shapes().items()}
    request = {"query": rng.standard_normal((2, queries, 14)), "key": rng.standard_normal((2, keys, 14)), "query_offset": offset}
    return Case(spec, {"causal": queries > 1, **request}, weights)


@pytest.mark.parametrize("relative", [XL, BUCKETS], ids=lambda relative: relative["kind"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1033), (331, 337), (1031, 3)])
def test_long_calls_agree_with_the_reference(client: Client, relative: dict[str, Any], queries: int, keys: int) -> None:
    case = drawn(relative, queries, keys, dtype="float64")
    exact = put(client, case)
    result = client.attend(**case.request, layer=LAYER, outputs=["output", "log_sum_exp"])
    for name in ("output", "log_sum_exp"):
        agree(case, name, result[name], getattr(exact, name))


@pytest.mark.parametrize("relative", [XL, XL | {"interleaved": True}, BUCKETS], ids=str)
@pytest.mark.parametrize("offset", [[0, 10_000_000], [1 - 2**31, 2**31 - 1], [5, -7]], ids=str)
def test_scores_are_exact_at_distant_positions(client: Client, relative: dict[str, Any], offset: list[int]) -> None:
    """In float32, with another offset for each item."""
    case = drawn(relative, 7, 11, offset, dtype="float32")
    case.request["causal"] = False
    exact = put(client, case)
    agree(case, "scores", client.attend(**case.request, layer=LAYER, outputs=["scores"]).scores, exact.scores, 3e-6)
