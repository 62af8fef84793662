"""/sessions over HTTP: steps of a session, refusals, forks, caches as files, keys, and its end."""

from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from attend.wire.safetensors import read_tensors, write_tensors
from support.server import Server

RNG = np.random.default_rng(0)
SAFETENSORS = "application/vnd.safetensors"
LENGTH, STEPS = 41, (7, 1, 1, 5, 1, 11, 1, 13, 1)


@pytest.fixture
def session(http: httpx.Client) -> str:
    return str(http.post("/sessions", json={}).json()["id"])


def rows(count: int = LENGTH) -> Any:
    return RNG.standard_normal((count, 64)).round(3)


def step(http: httpx.Client, session: str, query: Any, **fields: Any) -> httpx.Response:
    return http.post(f"/sessions/{session}/attend", json={"query": query.tolist(), "causal": True, **fields})


def refusal(reply: httpx.Response, status: int) -> str:
    assert reply.status_code == status, reply.text
    return str(reply.json()["detail"])


def test_steps_equal_one_causal_call(http: httpx.Client, session: str) -> None:
    sequence, outputs, start = rows(), [], 0
    whole = http.post("/attend", json={"query": sequence.tolist(), "causal": True}).json()
    for count in STEPS:
        wanted = ["output"] if count == 1 else ["output", "attention_weights"]
        reply = step(http, session, sequence[start : start + count], expected_length=start, outputs=wanted).json()
        start += count
        outputs += reply["output"]
        assert reply["session"] == {"id": session, "length": start}

    np.testing.assert_allclose(outputs, whole["output"], rtol=0, atol=1e-6 * np.abs(whole["output"]).max())


def test_a_step_without_append_appends_nothing(http: httpx.Client, session: str) -> None:
    sequence = rows(5)
    step(http, session, sequence)
    look = step(http, session, sequence[-1:], append=False, query_offset=4, outputs=["output", "attention_weights"]).json()

    assert look["session"]["length"] == 5
    assert np.shape(look["attention_weights"]) == (8, 1, 5)
    assert "no key, since append is false" in refusal(step(http, session, sequence, key=sequence.tolist(), append=False), 422)


def test_a_wrong_expected_length_is_refused_and_nothing_is_appended(http: httpx.Client, session: str) -> None:
    step(http, session, rows(5))

    assert "the length of the session is 5, but expected_length is 3" in refusal(step(http, session, rows(1), expected_length=3), 412)
    assert http.get(f"/sessions/{session}").json()["length"] == 5


def test_a_rollback_does_not_change_a_fork(http: httpx.Client, session: str) -> None:
    sequence = rows(23)
    whole = step(http, session, sequence, outputs=["output"]).json()["output"]
    fork = http.post(f"/sessions/{session}/fork", json={"length": 17})
    assert fork.status_code == 201 and fork.headers["location"] == f"/sessions/{fork.json()['id']}"
    assert http.patch(f"/sessions/{session}", json={"length": 17}).json()["length"] == 17

    step(http, session, rows(4))  # other rows: they must not reach the fork
    again = step(http, fork.json()["id"], sequence[17:], outputs=["output"]).json()["output"]
    np.testing.assert_allclose(again, whole[17:], rtol=0, atol=1e-6)
    assert "at most 21" in refusal(http.patch(f"/sessions/{session}", json={"length": 22}), 422)


def test_an_exported_cache_can_be_imported_into_another_session(http: httpx.Client, session: str) -> None:
    sequence = rows(19)
    step(http, session, sequence[:18])
    file = http.get(f"/sessions/{session}/cache")
    other = http.post("/sessions", json={}).json()["id"]
    put = http.put(f"/sessions/{other}/cache", content=file.content, headers={"content-type": SAFETENSORS})

    assert put.json()["length"] == 18
    first, second = (step(http, name, sequence[18:], outputs=["output"]).json()["output"] for name in (session, other))
    assert first == second
    assert http.get(f"/sessions/{other}/cache").content == http.get(f"/sessions/{session}/cache").content


def test_a_cache_of_another_layer_is_refused(http: httpx.Client, session: str) -> None:
    step(http, session, rows(3))
    content = http.get(f"/sessions/{session}/cache").content
    http.put("/layers/other", json={"spec": {"d_model": 64, "num_heads": 8, "seed": 1}})
    other = http.post("/sessions", json={"layer": "other"}).json()["id"]

    assert "a body of type application/vnd.safetensors" in refusal(http.put(f"/sessions/{session}/cache", content=content), 415)
    extended = write_tensors({**read_tensors(content)[0], "latent": np.zeros((3, 2))}, read_tensors(content)[1])
    put = http.put(f"/sessions/{session}/cache", content=b"".join(map(bytes, extended)), headers={"content-type": SAFETENSORS})
    assert "no tensors but key, value" in refusal(put, 422)
    assert "fingerprint" in refusal(http.put(f"/sessions/{other}/cache", content=content, headers={"content-type": SAFETENSORS}), 409)
    http.delete("/layers/other")
    assert "its layer was removed" in refusal(http.get(f"/sessions/{other}"), 410)


def test_fields_that_sessions_do_not_support_are_refused(http: httpx.Client, session: str) -> None:
    query = rows(3)
    assert "no layer, since the session has one" in refusal(step(http, session, query, layer="default"), 422)
    gradient = {"outputs": ["query_gradient"], "output_gradient": query.tolist()}
    assert "no gradients" in refusal(step(http, session, query, **gradient), 422)
    assert "one sequence" in refusal(step(http, session, np.stack((query, query))), 422)
    assert "64 values per query" in refusal(step(http, session, query[:, :63]), 422)
    assert "/query_lengths" in refusal(step(http, session, query, query_lengths=[3]), 422)


def test_a_deleted_session_is_410_and_an_unknown_id_404(http: httpx.Client, session: str) -> None:
    assert http.delete(f"/sessions/{session}").status_code == 204
    assert "it was deleted" in refusal(http.get(f"/sessions/{session}"), 410)
    assert "the id of a session" in refusal(http.get(f"/sessions/{session[:-3]}abc"), 404)
    assert session not in [document["id"] for document in http.get("/sessions").json()["sessions"]]


def test_a_server_without_session_memory_refuses_sessions(start: Callable[..., Server]) -> None:
    with httpx.Client(base_url=start().url) as http:
        assert "--session-memory" in refusal(http.post("/sessions", json={}), 404)


@pytest.mark.parametrize("fields", [{}, {"indexer": {"num_heads": 2, "head_dim": 5, "top_k": 3}}], ids=["plain", "indexer"])
def test_analysis_and_plan_take_a_session_in_place_of_keys(http: httpx.Client, fields: dict[str, Any]) -> None:
    http.put("/layers/looked_at", json={"spec": {"d_model": 64, "num_heads": 8, **fields}})
    session = http.post("/sessions", json={"layer": "looked_at"}).json()["id"]
    sequence = rows(11)
    step(http, session, sequence)
    look = {"query": sequence[7:].tolist(), "query_offset": 7, "causal": True}
    whole = {**look, "key": sequence.tolist(), "layer": "looked_at"}
    metrics = {"metrics": ["entropy", "value_norms", "zero_ablation"]}
    ours = http.post("/attend/analysis", json={**look, **metrics, "session": session}).json()["metrics"]
    expected = http.post("/attend/analysis", json={**whole, **metrics}).json()["metrics"]

    for name, numbers in expected.items():
        for part in numbers if isinstance(numbers, dict) else [None]:
            pair = (ours[name], numbers) if part is None else (ours[name][part], numbers[part])
            np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-6, err_msg=name)
    plans = [http.post("/attend/plan", json=body).json() for body in ({**look, "session": session}, whole)]
    assert plans[0] == plans[1]
    assert http.get(f"/sessions/{session}").json()["length"] == 11
    refused = http.post("/attend/analysis", json={**look, **metrics, "session": session, "key": sequence.tolist()})
    assert "no key beside session" in refusal(refused, 422)
    assert "/sessions/{id}/attend" in refusal(http.post("/attend", json={**look, "session": session}), 422)
    http.delete("/layers/looked_at")


@pytest.mark.parametrize("kind", ["head", "concatenation"])
def test_a_figure_of_a_session_is_that_of_its_rows(http: httpx.Client, session: str, kind: str) -> None:
    sequence = rows(11)
    step(http, session, sequence)
    look = {"query": sequence[7:].tolist(), "query_offset": 7, "causal": True, "figure": {"kind": kind, "format": "svg"}}
    ours = http.post("/attend/figure", json={**look, "session": session})

    assert ours.status_code == 200, ours.text
    assert ours.text.count("<text") == http.post("/attend/figure", json={**look, "key": sequence.tolist()}).text.count("<text")


def test_segments_and_positions_of_a_session(http: httpx.Client) -> None:
    """Queries and keys have their own segments. Positions are those of the new rows, also if there are none."""
    http.put("/layers/axes", json={"spec": {"d_model": 16, "num_heads": 2, "rope": {"axes": [0, 0, 1, 1], "requires_positions": True}}})
    session = http.post("/sessions", json={"layer": "axes"}).json()["id"]
    sequence, positions = RNG.standard_normal((5, 16)), [[i, i // 2] for i in range(5)]
    whole = {"layer": "axes", "query": sequence.tolist(), "positions": positions, "causal": True}
    expected = http.post("/attend", json=whole).json()["output"]
    assert step(http, session, sequence, positions=positions).status_code == 200
    look = {"append": False, "positions": positions[4:], "query_offset": 4, "outputs": ["output"]}

    np.testing.assert_allclose(step(http, session, sequence[4:], **look).json()["output"], expected[4:], rtol=0, atol=1e-6)
    analysis = {"query": sequence[4:].tolist(), "positions": positions[4:], "query_offset": 4, "metrics": ["entropy"]}
    assert http.post("/attend/analysis", json={**analysis, "session": session}).status_code == 200
    refused = step(http, session, sequence[:1], positions=positions[:1], segments=[1])
    assert "query_segments and key_segments" in refusal(refused, 422)
    http.delete("/layers/axes")


def test_metrics_of_all_values_are_refused_once_rows_are_freed(http: httpx.Client) -> None:
    http.put("/layers/window", json={"spec": {"d_model": 512, "num_heads": 8, "window": {"left": 100}}})
    session = http.post("/sessions", json={"layer": "window"}).json()["id"]
    sequence = np.zeros((600, 512), np.float32)
    body = b"".join(map(bytes, write_tensors({"query": sequence}, {"request": '{"causal": true, "outputs": ["output"]}'})))
    for _ in range(2):
        http.post(f"/sessions/{session}/attend", content=body, headers={"content-type": SAFETENSORS}).raise_for_status()
    look = {"session": session, "query": sequence[:1].tolist(), "causal": True}

    assert http.post("/attend/analysis", json={**look, "metrics": ["entropy"]}).status_code == 200
    refused = http.post("/attend/analysis", json={**look, "metrics": ["value_norms"]})
    assert "metrics of visible keys alone" in refusal(refused, 409)
    assert "at least" in refusal(http.patch(f"/sessions/{session}", json={"length": 100}), 409)
    assert http.patch(f"/sessions/{session}", json={"length": 0}).json()["length"] == 0
    http.delete("/layers/window")


def test_forks_do_not_end_each_other_for_pages_that_they_share(start: Callable[..., Server]) -> None:
    page = 4 << 20
    with httpx.Client(base_url=start("--session-memory", str(2 * page)).url, timeout=60) as http:
        http.put("/layers/wide", json={"spec": {"d_model": 512, "num_heads": 8}})
        parent = http.post("/sessions", json={"layer": "wide"}).json()["id"]
        sequence = np.zeros((2000, 512), np.float32)
        body = b"".join(map(bytes, write_tensors({"query": sequence}, {"request": '{"outputs": ["output"]}'})))
        http.post(f"/sessions/{parent}/attend", content=body, headers={"content-type": SAFETENSORS}).raise_for_status()
        forks = [http.post(f"/sessions/{parent}/fork", json={}).json()["id"] for _ in range(3)]
        assert "session_memory" in refusal(step(http, forks[0], sequence[:1]), 507)
        assert len(http.get("/sessions").json()["sessions"]) == 4


def test_sessions_and_forks_need_no_body(http: httpx.Client) -> None:
    created = http.post("/sessions")
    assert created.status_code == 201 and created.json()["layer"]["name"] == "default"
    path = f"/sessions/{created.json()['id']}"
    assert http.post(f"{path}/fork").status_code == 201
    assert "/length" in refusal(http.patch(path), 422)


@pytest.mark.parametrize("path", ["/attend/analysis", "/attend/figure", "/attend/plan"])
def test_an_unknown_session_in_a_body_is_refused_with_a_pointer(http: httpx.Client, session: str, path: str) -> None:
    http.delete(f"/sessions/{session}")
    cases = ((session, 410, "it was deleted"), ("nonsense", 404, "the id of a session"), (7, 422, "a string"))
    for name, status, words in cases:
        reply = http.post(path, json={"query": rows(1).tolist(), "session": name})
        assert words in refusal(reply, status)
        assert [error["at"] for error in reply.json()["errors"]] == ["/session"]


def test_plan_and_analysis_accept_null_as_session(http: httpx.Client) -> None:
    for path in ("/attend/plan", "/attend/analysis"):
        assert http.post(path, json={"query": rows(1).tolist(), "session": None}).status_code == 200


def test_a_plan_refuses_what_a_step_refuses(http: httpx.Client, session: str) -> None:
    body = {"query": rows(1).tolist(), "outputs": ["output", "query_gradient"], "output_gradient": rows(1).tolist()}
    for path, more in ((f"/sessions/{session}/attend", {"append": False}), ("/attend/plan", {"session": session})):
        reply = http.post(path, json={**body, **more})
        assert "no gradients, since a session does not keep" in refusal(reply, 422)
        assert [error["at"] for error in reply.json()["errors"]] == ["/outputs/1"]


def test_the_refusal_of_a_misspelt_field_suggests_the_right_one(http: httpx.Client, session: str) -> None:
    for name, meant in (("apend", "append"), ("expected_lenght", "expected_length"), ("causl", "causal")):
        assert f"did you mean {meant}?" in refusal(http.post(f"/sessions/{session}/attend", json={"query": rows(1).tolist(), name: 1}), 422)
