"""`pattern` and `head_outputs`: weights and outputs of heads in place of the computed ones, against the float64 reference and NumPy."""

from typing import Any

import httpx
import numpy as np
import pytest

from attend import Client, errors
from attend.attention.reference.forward import attend
from attend.spec import LayerSpec

B, H, Q, K, D, DV = 2, 6, 5, 7, 4, 3
SPEC = {
    "d_model": 11,
    "num_heads": H,
    "num_kv_heads": 2,
    "head_dim": D,
    "value_head_dim": DV,
    "key_dim": 13,
    "value_dim": 5,
    "output_dim": 17,
    "dtype": "float64",
    "seed": 9,
}
RNG = np.random.default_rng(31)
REQUEST = {name: RNG.standard_normal((B, n, w)) for name, n, w in (("query", Q, 11), ("key", K, 13), ("value", K, 5))}
PATTERN = RNG.standard_normal((B, H, Q, K))
GIVEN = RNG.standard_normal((B, H, Q, DV))
HEADS = np.array([1, 0, 0, 1, 1, 0])
ROWS = RNG.random((B, H, Q)) < 0.5
OUTPUTS = ["output", "attention_weights", "scores", "head_outputs", "concatenated"]
CASES: dict[str, dict[str, Any]] = {
    "pattern of all": {"pattern": PATTERN},
    "pattern of heads": {"pattern": PATTERN, "pattern_rows": HEADS},
    "one pattern": {"pattern": PATTERN[0, 0], "pattern_rows": np.array([HEADS, 1 - HEADS])},
    "pattern of items": {"pattern": PATTERN[:, 1], "pattern_rows": ROWS, "head_scale": [0, 1, 2, 3, 4, 5]},
    "pattern and masks": {"pattern": PATTERN[..., :1], "pattern_rows": ROWS, "valid_lens": np.array([0, 4]), "softcap": 2.0},
    "pattern and dropout": {"pattern": PATTERN, "pattern_rows": ROWS, "dropout": {"p": 0.3, "seed": 4}},
    "outputs of all": {"head_outputs": GIVEN},
    "outputs of heads": {"head_outputs": GIVEN[:1], "head_output_rows": HEADS},
    "one output": {"head_outputs": GIVEN[:, :, 2:3], "head_output_rows": ROWS, "head_scale": [0, 1, 2, 3, 4, 5]},
    "both": {"pattern": PATTERN, "pattern_rows": ROWS, "head_outputs": GIVEN, "head_output_rows": HEADS, "causal": True, "query_offset": 2},
}
KINDS: dict[str, dict[str, Any]] = {  # layers whose weights or outputs of heads are made in other ways
    "plain": {},
    "sinks": {"sinks": True},
    "talking heads": {"talking_heads": True, "num_kv_heads": H},
    "sigmoid": {"normalizer": "sigmoid"},
    "differential": {"differential": {"lambda_init": 0.7}},
    "gate": {"output_gate": {"activation": "sigmoid"}},
    "half": {"dtype": "bfloat16"},
}


@pytest.fixture(scope="module", params=KINDS)
def layer(request: pytest.FixtureRequest, client: Client) -> Any:
    """A layer on the server: its name, spec and weights in float64."""
    made = client.put_layer("replaced", {**SPEC, **KINDS[request.param]})
    weights = {name: x.astype(np.float64) for name, x in client.layer_weights("replaced").items()}
    yield made.name, made.spec, weights
    client.delete_layer("replaced")


@pytest.mark.parametrize("name", CASES)
def test_replaced_rows_are_those_of_the_reference(client: Client, layer: tuple[str, LayerSpec, Any], name: str) -> None:
    at, spec, weights = layer
    fields = {**REQUEST, **CASES[name]}
    if spec.differential is not None:  # dropout of a difference is not defined
        fields.pop("dropout", None)
    expected = attend(spec, weights, **fields)
    names = [output for output in OUTPUTS if spec.differential is None or output != "scores"]
    for outputs in (names, ["output"]):
        result = client.attend(**fields, layer=at, outputs=outputs)
        tolerance = 1e-12 if spec.dtype == "float64" else 0.2
        for output in outputs:
            np.testing.assert_allclose(result[output].astype(np.float64), getattr(expected, output), rtol=tolerance, atol=tolerance)


def test_replaced_rows_by_hand(client: Client) -> None:
    """Without the reference: weights times values of the replaced heads, and the outputs that were given."""
    client.put_layer("replaced-by-hand", SPEC)
    plain = client.attend(**REQUEST, layer="replaced-by-hand", outputs=[*OUTPUTS, "value_projection"])
    fields = {"pattern": PATTERN, "pattern_rows": ROWS, "head_outputs": GIVEN, "head_output_rows": HEADS}
    result = client.attend(**REQUEST, **fields, layer="replaced-by-hand", outputs=OUTPUTS)
    weights = np.where(ROWS[..., None], PATTERN, plain.attention_weights)
    values = np.repeat(plain.value_projection, H // 2, axis=1)
    heads = np.where(HEADS.astype(bool)[:, None, None], GIVEN, np.einsum("bhqk,bhkd->bhqd", weights, values))
    own = client.layer_weights("replaced-by-hand")
    output = heads.transpose(0, 2, 1, 3).reshape(B, Q, -1) @ own["output.weight"].T + own["output.bias"]
    np.testing.assert_allclose(result.attention_weights, weights, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(result.output, output, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(result.scores, plain.scores)
    selected = client.attend(
        **REQUEST, **fields, layer="replaced-by-hand", outputs=["attention_weights"], select={"heads": [4, 1], "queries": [3, 0]}
    )
    np.testing.assert_allclose(selected.attention_weights, weights[:, [4, 1]][:, :, [3, 0]], rtol=1e-12, atol=1e-12)
    client.delete_layer("replaced-by-hand")


def test_heads_patched_from_their_own_run_change_nothing(client: Client) -> None:
    rows = {"pattern_rows": ROWS, "head_output_rows": ROWS}
    client.put_layer("patched", SPEC)
    plain = client.attend(**REQUEST, layer="patched", outputs=OUTPUTS, causal=True, query_offset=0)
    again = client.attend(**REQUEST, layer="patched", pattern=plain.attention_weights, head_outputs=plain.head_outputs, **rows)
    free = client.attend(**REQUEST, layer="patched", pattern=plain.attention_weights, head_outputs=plain.head_outputs)
    np.testing.assert_allclose(free.output, plain.output, rtol=1e-12, atol=1e-12)
    assert np.abs(again.output - plain.output).max() > 1e-3  # other rows are not causal
    client.delete_layer("patched")


@pytest.mark.parametrize("name", ["pattern of items", "one output", "both", "pattern of all", "outputs of all"])
def test_gradients_are_those_of_the_changed_call(client: Client, name: str) -> None:
    """Against differences of the reference in float64."""
    client.put_layer("replaced-gradients", SPEC)
    spec, weights = LayerSpec.model_validate(SPEC), client.layer_weights("replaced-gradients")
    fields, direction, step = {**REQUEST, **CASES[name]}, RNG.standard_normal((B, Q, 17)), 1e-6
    names = ["query", "key", "value"]
    found = client.attend(**fields, layer="replaced-gradients", outputs=[f"{n}_gradient" for n in names], output_gradient=direction)
    for n in names:
        for at in ((0, 1, 2), (1, 4, 3)):
            change = np.zeros_like(fields[n])
            change[at] = step
            above, below = (attend(spec, weights, **{**fields, n: fields[n] + sign * change}).output for sign in (1, -1))
            slope = (direction * (above - below)).sum() / (2 * step)
            np.testing.assert_allclose(found[f"{n}_gradient"][at], slope, rtol=1e-6, atol=1e-8)
    client.delete_layer("replaced-gradients")


def test_steps_of_a_session_have_them_too(start_here: Any) -> None:
    with Client(start_here(session_memory=1 << 24)) as client:
        spec = {"d_model": 8, "num_heads": 2, "dtype": "float64", "seed": 3}
        client.put_layer("stepped", spec)
        rows = RNG.standard_normal((5, 8))
        given, pattern = RNG.standard_normal((2, 1, 4)), RNG.random((1, 5))
        fields: dict[str, Any] = {"pattern_rows": [1, 0], "head_output_rows": [0, 1]}
        with client.session("stepped") as session:
            session.attend(rows[:4], causal=True)
            last = session.attend(rows[4:], pattern=pattern, head_outputs=given, **fields)
        whole = client.attend(rows[4:], rows, layer="stepped", pattern=pattern, head_outputs=given, **fields)
        np.testing.assert_allclose(last.output, whole.output, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(last.attention_weights[0], pattern, rtol=1e-12)


def test_weights_of_rows_that_a_session_has_freed_are_refused(start_here: Any) -> None:
    with Client(start_here(session_memory=1 << 24)) as client:
        client.put_layer("freeing", {"d_model": 512, "num_heads": 8, "window": {"left": 100}})
        rows, pattern = np.zeros((601, 512), np.float32), np.zeros((1, 1201), np.float32)
        with client.session("freeing") as session:
            for _ in range(2):
                session.attend(rows[:600], causal=True, outputs=["output"])
            with pytest.raises(errors.SessionConflict, match="weights of 0 for the first"):
                session.attend(rows[600:], pattern=np.full_like(pattern, 0.1), outputs=["output"])
            pattern[:, -1] = 1
            last = session.attend(rows[600:], pattern=pattern, outputs=["attention_weights"])
        np.testing.assert_array_equal(last.attention_weights[3], pattern)


def test_metrics_are_of_the_replaced_heads(client: Client) -> None:
    uniform = client.analysis(RNG.standard_normal((7, 64)), pattern=np.full((7, 7), 1 / 7), pattern_rows=[1] + 7 * [0])
    assert uniform["normalised_entropy"][0] == pytest.approx(1)
    assert uniform["normalised_entropy"][1:].max() < 1


def test_negative_weights_are_no_shares(client: Client) -> None:
    """Metrics of weights are refused, by default those of outputs are computed; pictures have colours for negative weights."""
    query, pattern = RNG.standard_normal((3, 64)), np.array([[1.0, -0.5, 0.5]] * 3)
    given: dict[str, Any] = {"pattern": pattern, "pattern_rows": [1] + 7 * [0]}
    assert set(client.analysis(query, **given)) == {"output_disagreement", "contribution", "zero_ablation"}
    with pytest.raises(errors.InvalidRequest, match="no negative weights, with entropy among the metrics, got some, at /pattern"):
        client.analysis(query, **given, metrics=["contribution", "entropy"])
    with pytest.raises(errors.InvalidRequest, match="where weights may be negative, got log, at /figure/scale"):
        client.figure(query, **given, figure={"scale": "log"})
    signed, positive = (client.figure(query, pattern=x, kind="head", format="svg") for x in (pattern, abs(pattern)))
    assert b"Colour: attention weight, -1 to 1." in signed and b"Colour: attention weight, -1" not in positive


@pytest.mark.parametrize(
    ("fields", "at", "expected"),
    [
        ({"pattern_rows": [1] * 8}, "/pattern_rows", "pattern in addition to pattern_rows"),
        ({"head_output_rows": [1] * 8}, "/head_output_rows", "head_outputs in addition to head_output_rows"),
        ({"pattern": np.ones((3, 4))}, "/pattern", "shape [3, 3]"),
        ({"pattern": np.ones((7, 3, 3))}, "/pattern", "8 heads"),
        ({"pattern": np.ones((3, 3)), "pattern_rows": np.ones((8, 2), int)}, "/pattern_rows", "[heads, 3]"),
        ({"pattern": np.ones((3, 3)), "pattern_rows": [1, 2] * 4}, "/pattern_rows/1", "0, 1, true or false"),
        ({"head_outputs": np.ones((8, 3, 5))}, "/head_outputs", "8 values per query"),
        ({"head_outputs": np.full((8, 3, 8), np.inf)}, "/head_outputs/0/0/0", "a finite float32"),
        ({"pattern": np.ones((3, 3)), "query_lengths": [1, 2]}, "/pattern", "no pattern beside query_lengths"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(client: Client, fields: dict[str, Any], at: str, expected: str) -> None:
    with pytest.raises(errors.InvalidRequest) as refused:
        client.attend(np.ones((3, 64)), **fields)
    (problem,) = refused.value.problems
    assert problem.at == at
    assert expected in problem.expected


def test_json_and_the_inference_protocol_carry_them(http: httpx.Client, client: Client) -> None:
    query, pattern, rows = RNG.standard_normal((1, 3, 64)), RNG.random((3, 3)), np.array([0, 1] * 4)
    expected = client.attend(query, pattern=pattern, pattern_rows=rows, head_outputs=np.zeros((1, 8, 1, 8)), head_output_rows=[1] + [0] * 7)
    lists = {"pattern": pattern.tolist(), "pattern_rows": rows.tolist()}
    lists |= {"head_outputs": np.zeros((1, 8, 1, 8)).tolist(), "head_output_rows": [True] + [False] * 7}
    plain = http.post("/attend", json={"query": query.tolist(), **lists}).json()
    np.testing.assert_allclose(plain["output"], expected.output, atol=1e-6)
    tensors = {"query": query, "pattern": pattern, "pattern_rows": rows, "head_outputs": np.zeros((1, 8, 1, 8))}
    inputs = [
        {"name": name, "shape": list(x.shape), "datatype": "FP64" if x.dtype == float else "INT64", "data": x.ravel().tolist()}
        for name, x in tensors.items()
    ]
    inputs.append({"name": "head_output_rows", "shape": [8], "datatype": "BOOL", "data": [True] + [False] * 7})
    answer = http.post("/v2/models/default/infer", json={"inputs": inputs, "outputs": [{"name": "output"}]})
    assert answer.status_code == 200, answer.text
    np.testing.assert_allclose(np.reshape(answer.json()["outputs"][0]["data"], (1, 3, 64)), expected.output, atol=1e-6)
