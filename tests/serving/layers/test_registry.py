"""Layers that are replaced and removed while they are called: each reply comes from one layer and names it."""

import threading
from typing import Any

import httpx
import numpy as np
import pytest

from support.waiting import until

NAME = "changing"
QUERY = np.random.default_rng(5).standard_normal((7, 16)).tolist()
SPECS = [{"d_model": 16, "num_heads": heads, "seed": seed} for heads, seed in ((2, 1), (4, 2))]
ROUNDS = 25


def test_a_reply_comes_from_one_layer_while_layers_are_replaced(http: httpx.Client) -> None:
    """Callers send requests while the layer of that name changes: each reply is of the old or the new layer, or 404, never a mixture."""
    expected: dict[str, Any] = {}
    for spec in SPECS:
        fingerprint = http.put(f"/layers/{NAME}", json={"spec": spec}).json()["fingerprint"]
        expected[fingerprint] = http.post("/attend", json={"layer": NAME, "query": QUERY}).json()
    over, seen, wrong = threading.Event(), set(), []

    def call() -> None:
        while not over.is_set():
            answer = http.post("/attend", json={"layer": NAME, "query": QUERY})
            if answer.status_code == 404:
                seen.add("none")
                continue
            document = answer.json()
            right = expected.get(document.get("layer", {}).get("fingerprint"))
            if answer.status_code != 200 or right is None:
                wrong.append(answer.text[:300])
                return
            seen.add(document["layer"]["fingerprint"])
            for name in ("output", "attention_weights"):
                if np.shape(document[name]) != np.shape(right[name]) or np.abs(np.subtract(document[name], right[name])).max() > 1e-6:
                    wrong.append(f"{name} is of another layer")

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for _ in range(ROUNDS):
        for spec in SPECS:
            http.put(f"/layers/{NAME}", json={"spec": spec}).raise_for_status()
        assert http.delete(f"/layers/{NAME}").status_code == 204

    def seen_all() -> bool:
        http.put(f"/layers/{NAME}", json={"spec": SPECS[len(seen) % 2]})
        http.delete(f"/layers/{NAME}")
        return len(seen) == 3 or bool(wrong)

    until(seen_all, "both layers and none were met")  # otherwise the test proves nothing
    over.set()
    for caller in callers:
        caller.join()
    assert not wrong
    assert seen == {*expected, "none"}


@pytest.mark.parametrize(
    ("name", "status"),
    [("../x", 404), ("%2e%2e%2fx", 404), ("a/b", 404), ("a%2fb", 404), (".hidden", 422), ("", 404), ("a" * 65, 422), ("a%00", 422)],
)
def test_layer_names_that_look_like_paths_are_refused(http: httpx.Client, name: str, status: int) -> None:
    assert http.put(f"/layers/{name}", json={"spec": SPECS[0]}).status_code == status
