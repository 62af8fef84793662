"""Scores by content and distance in the reference, against hand-computed numbers and functions of transformers."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support.transformers_positions import deberta_bucket

from service.attention.reference.forward import attend
from service.attention.reference.positions import distance_buckets
from service.spec import LayerSpec
from service.spec_parts import RelativeScores


def related(**fields):
    """A layer of one head of one number, whose queries are 3, keys 5 and values 0, and the scores of three queries."""
    spec = LayerSpec(**{"d_model": 2, "num_heads": 1, "head_dim": 1, "scale": 1.0, "bias": False, "dtype": "float64"} | fields)
    weights = {name: np.zeros(shape) for name, shape in spec.weight_shapes().items()}
    weights |= {"query.weight": np.array([[3.0, 0.0]]), "key.weight": np.array([[5.0, 0.0]])}
    return lambda **more: attend(spec, weights | more, query=np.full((3, 2), 1.0)).scores[0] - 15.0


@pytest.mark.parametrize("interleaved", [False, True])
def test_terms_of_transformer_xl_equal_hand_computed_numbers(interleaved):
    """u·k, then (q + v)·r with r the first number of R_D, sin D, or the second, cos D: of a width of 2, the only frequency is 1."""
    scores = related(relative_scores={"kind": "transformer_xl", "interleaved": interleaved})
    distance = np.subtract.outer(np.arange(3), np.arange(3))
    np.testing.assert_allclose(scores(content_bias=np.array([[7.0]])), 35.0, rtol=1e-15)
    for wave, row in zip((np.sin, np.cos), np.eye(2), strict=True):
        got = scores(**{"position_key.weight": row[None], "position_bias": np.array([[4.0]])})
        np.testing.assert_allclose(got, 7.0 * wave(distance), rtol=1e-14)


def test_terms_of_deberta_equal_hand_computed_numbers():
    """Columns 0 to 3 are distances of -2 or less, -1, 0, and 1 or more, for queries (3) and keys (5)."""
    scores = related(relative_scores={"kind": "disentangled", "max_distance": 2, "position_to_content": True})
    buckets = np.array([[2, 1, 0], [3, 2, 1], [3, 3, 2]])
    columns = np.array([0.1, 0.2, 0.4, 0.8])
    np.testing.assert_allclose(scores(**{"position_key.weight": columns[None]}), 3 * columns[buckets], rtol=1e-13)
    np.testing.assert_allclose(scores(**{"position_query.weight": columns[None]}), 5 * columns[buckets], rtol=1e-13)


@pytest.mark.parametrize(("buckets", "max_distance"), [(256, 512), (32, 128), (6, 20), (7, 9), (4, 5000)])
def test_buckets_equal_those_of_deberta(buckets, max_distance):
    """The function of transformers, at distances beyond those of any checkpoint."""
    distances = np.arange(-3000, 3001)
    theirs = deberta_bucket(torch.from_numpy(distances), buckets, max_distance).numpy() + buckets
    settings = RelativeScores(kind="disentangled", buckets=buckets, max_distance=max_distance)
    np.testing.assert_array_equal(distance_buckets(distances, settings), np.clip(theirs, 0, 2 * buckets - 1))


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"projections": False}, "/relative_scores"),
        ({"init": "torch_mha"}, "/relative_scores"),
        ({"rope": {}}, "/rope"),
        ({"query_scale": {"factor": 0.1, "length": 3}}, "/query_scale"),
        ({"d_model": 15, "num_heads": 3}, "/d_model"),
        ({"relative_scores": {"kind": "transformer_xl", "buckets": 8}}, "/buckets"),
        ({"relative_scores": {"kind": "transformer_xl", "position_to_content": True}}, "/position_to_content"),
        ({"relative_scores": {"kind": "disentangled"}}, "/max_distance"),
        ({"relative_scores": {"kind": "disentangled", "max_distance": 3, "interleaved": True}}, "/interleaved"),
        ({"relative_scores": {"kind": "disentangled", "max_distance": 5, "buckets": 8}}, "/max_distance"),
    ],
    ids=str,
)
def test_invalid_relative_scores_are_refused(fields, place):
    with pytest.raises(ValidationError) as caught:
        LayerSpec(**{"d_model": 4, "num_heads": 2, "relative_scores": {"kind": "transformer_xl"}} | fields)
    assert caught.value.errors()[0]["ctx"]["at"] == place
