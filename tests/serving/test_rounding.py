"""Which calls may share a batch, by the size of their scores."""

import numpy as np
import pytest
import torch

from attend.serving.calls import make_call
from attend.serving.rounding import may_amplify_rounding, score_deviation
from attend.spec import LayerSpec
from attend.wire.schemas.attend import AttendRequest


@pytest.mark.parametrize(("size", "amplifies"), [(1.0, False), (100.0, True)])
def test_norms_with_large_weights_make_large_scores(size: float, amplifies: bool) -> None:
    spec = LayerSpec(d_model=6, num_heads=3, qk_norm={"kind": "rms"})
    weights = {name: torch.ones(shape) for name, shape in spec.weight_shapes().items()}
    weights["query_norm.weight"] *= size
    call = make_call(AttendRequest(query=np.ones((1, 5, 6))), spec)
    assert may_amplify_rounding(spec, score_deviation(spec, weights), call) is amplifies


@pytest.mark.parametrize(("offset", "largest"), [(0, 8 / np.log(5)), (10_000, 8 / np.log(5) / (1 + 0.5 * np.log(1 + 10_005 // 7)))])
def test_scores_grow_with_the_position_of_queries_and_the_number_of_keys(offset: int, largest: float) -> None:
    """The largest deviation of scores of calls that may share a batch: 8, divided by ln n for n = 5 keys and by the factor of query 4."""
    spec = LayerSpec(d_model=6, num_heads=3, scale=1.0, query_scale={"factor": 0.5, "length": 7, "shift": 1}, normalizer="scalable_softmax")
    call = make_call(AttendRequest(query=np.ones((1, 5, 6)), query_offset=offset), spec)
    assert not may_amplify_rounding(spec, 0.99 * largest, call)
    assert may_amplify_rounding(spec, 1.01 * largest, call)
