"""Each limit of a call: the setting, a request just beyond it and one just within; refused by name, and foretold by the plan."""

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from service.settings import Settings
from service.web.app import create_app

QUERY = {"query": [[[0.5] * 64] * 8] * 3}  # 3 items, 8 queries, 8 heads
PLAN = {
    "max_batch_items": (3, 2, "/query"),
    "max_pairs": (8 * 8 * 8, 8 * 8 * 8 - 1, ""),
    "max_scores": (3 * 512, 3 * 512 - 1, ""),
    "max_operations": (2_000_000, 500_000, ""),
    "max_reply_bytes": (60_000, 20_000, ""),
}


def answers(settings: Settings, *requests: dict[str, Any]) -> list[httpx.Response]:
    async def ask() -> list[httpx.Response]:
        app = create_app(settings)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        async with app.router.lifespan_context(app), client:
            while not app.state.engine.started:
                await asyncio.sleep(0.001)
            return [await client.request("POST", **request) for request in requests]

    return asyncio.run(ask())


@pytest.mark.parametrize("setting", PLAN)
def test_a_limit_of_a_call(setting: str) -> None:
    """413 with limit, request and setting; the plan says the same beforehand; within it nothing is said."""
    enough, too_little, at = PLAN[setting]
    bodies = [{"url": path, "json": QUERY} for path in ("/attend/plan", "/attend")]

    plan, answer = answers(Settings(**{setting: enough}, access_log=False), *bodies)
    assert (answer.status_code, plan.json()["admitted"], plan.json()["refusals"]) == (200, True, [])

    plan, answer = answers(Settings(**{setting: too_little}, access_log=False), *bodies)
    assert answer.status_code == 413
    assert plan.json()["admitted"] is False
    (problem,) = answer.json()["errors"]
    assert problem in plan.json()["refusals"]
    assert problem["at"] == at
    assert setting in problem["expected"]
    assert str(too_little) in problem["expected"]
    assert int(problem["got"]) > too_little


def test_the_number_of_tensors() -> None:
    """In safetensors, and as members of a JSON object."""
    tensors = {f"tensor{i}": np.zeros(1, np.float32) for i in range(17)}
    binary = {"url": "/attend", "content": save(tensors), "headers": {"content-type": "application/vnd.safetensors"}}
    text = {"url": "/attend", "json": dict.fromkeys(tensors, 1)}
    for answer in answers(Settings(max_tensors=16, access_log=False), binary, text):
        assert answer.status_code == 413
        assert "max_tensors" in answer.text


def test_the_index_tells_every_limit(http: httpx.Client) -> None:
    """Whoever is refused can look up what would be taken."""
    limits = http.get("/").json()["limits"]
    assert set(limits) == {name for name in Settings.model_fields if name.startswith("max_")}


@pytest.mark.parametrize(
    ("field", "value", "expected"), [("outputs", [], "at least 1 of them"), ("layer", "../etc", "a text matching ^[A-Za-z0-9]")]
)
def test_refusals_are_in_our_own_words(http: httpx.Client, field: str, value: Any, expected: str) -> None:
    """Not in pydantic's."""
    answer = http.post("/attend", json={**QUERY, field: value})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["expected"].startswith(expected)
    assert "should" not in answer.text


def test_nothing_is_rounded_to_minus_zero(http: httpx.Client) -> None:
    """-0.4 to no decimals is 0."""
    text = http.post("/attend", json={"query": [[-0.01] * 64], "reply": {"decimals": 0}}).text
    assert "-0.0" not in text
