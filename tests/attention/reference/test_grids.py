"""Relative positions in a grid, and positions on several axes, against hand-computed numbers."""

import numpy as np
import pytest
from pydantic import ValidationError
from support.cases import layer_without_projections

from service.attention.reference.forward import attend
from service.spec import LayerSpec

# --- grids ----------------------------------------------------------------------------------------------------------------------------


def of_grid(weights, query, **grid):
    """The scores of one head of width 1 with keys 0, which are the grid's biases; the grid is 2 x 3 by default."""
    spec = layer_without_projections(grid_bias={"height": 2, "width": 3} | grid)
    return attend(spec, weights, query=query, key=np.zeros((6 + spec.grid_bias.class_token, 1)), query_offset=0).scores[0]


def test_a_table_has_a_bias_for_each_distance_in_a_grid():
    """Distances in rows, -1 to 1, by those in columns, -2 to 2: token 0 is at the upper left, so most keys are below it or to its right."""
    table = np.arange(15.0)[:, None]
    got = of_grid({"grid_bias": table}, np.zeros((6, 1)))
    assert got[0].tolist() == [7, 6, 5, 2, 1, 0]
    assert got[5].tolist() == [14, 13, 12, 9, 8, 7]
    assert np.diag(got).tolist() == [7] * 6


def test_a_class_token_has_separate_biases():
    got = of_grid({"grid_bias": np.arange(18.0)[:, None]}, np.zeros((7, 1)), class_token=True)
    assert got[0].tolist() == [17] + [15] * 6
    assert got[1:, 0].tolist() == [16] * 6
    assert got[1, 1:].tolist() == [7, 6, 5, 2, 1, 0]


def test_decomposed_positions_are_multiplied_with_the_query():
    """Rows give 10, 20, 30 for distances -1, 0, 1, columns 1 to 5 for -2 to 2, times the query."""
    weights = {"grid_rows": np.array([[10.0], [20.0], [30.0]]), "grid_columns": np.arange(1.0, 6)[:, None]}
    got = of_grid(weights, np.array([[1.0], [2], [3], [4], [5], [6]]), kind="decomposed")
    assert got[0].tolist() == [23, 22, 21, 13, 12, 11]
    assert got[5].tolist() == [6 * x for x in (35, 34, 33, 25, 24, 23)]


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"grid_bias": {"height": 2, "width": 3, "kind": "decomposed", "class_token": True}}, "/class_token"),
        ({"grid_bias": {"height": 2, "width": 3, "kind": "decomposed"}, "differential": {}}, "/grid_bias/kind"),
        ({"rope": {"axes": [0, 1]}}, "/axes"),
        ({"rope": {"axes": [0, 1, 2], "dims": 4}}, "/axes"),
    ],
    ids=str,
)
def test_invalid_grids_and_axes_are_refused(fields, place):
    with pytest.raises(ValidationError) as caught:
        LayerSpec(d_model=12, num_heads=2, **fields)
    assert caught.value.errors()[0]["ctx"]["at"] == place


# --- axes of positions ----------------------------------------------------------------------------------------------------------------


def test_each_pair_is_rotated_by_the_position_on_its_axis():
    """Three pairs at rows 2 and columns 5: the first and last are rotated by the row, the other by the column, as complex numbers."""
    spec = layer_without_projections(head_dim=6, rope={"frequencies": [1.0, 0.5, 0.25], "axes": [0, 1, 0]})
    got = attend(spec, {}, query=np.ones((1, 6)), positions=[[2.0, 5.0]]).query_projection[0, 0]
    points = (1 + 1j) * np.exp(1j * np.array([2.0, 2.5, 0.5]))
    np.testing.assert_allclose(got, [*points.real, *points.imag], rtol=1e-15)


@pytest.mark.parametrize("axes", [None, [0, 1, 2]])
def test_equal_positions_on_all_axes_equal_positions_on_one(axes):
    spec = LayerSpec(d_model=12, num_heads=2, rope={"axes": axes}, dtype="float64")
    rng, at = np.random.default_rng(5), np.arange(7.0)[None]
    query = rng.standard_normal((2, 7, 12))
    weights = {name: rng.standard_normal(shape) for name, shape in spec.weight_shapes().items()}
    text = attend(spec, weights, query=query, causal=True)
    same = attend(spec, weights, query=query, causal=True, positions=at if axes is None else np.repeat(at[..., None], 3, axis=-1))
    np.testing.assert_array_equal(text.output, same.output)
    moved = attend(spec, weights, query=query, causal=True, positions=(at if axes is None else np.repeat(at[..., None], 3, axis=-1)) + 1.5)
    np.testing.assert_allclose(text.output, moved.output, rtol=1e-12, atol=1e-12)
