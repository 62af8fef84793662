"""A layer that is replaced and removed while it is used: each answer is of one layer, whole, and says which."""

import threading
from typing import Any

import httpx
import numpy as np
import pytest

NAME = "changing"
QUERY = np.random.default_rng(5).standard_normal((7, 16)).tolist()
SPECS = [{"d_model": 16, "num_heads": heads, "seed": seed} for heads, seed in ((2, 1), (4, 2))]
ROUNDS = 25


def test_every_answer_is_of_one_layer(http: httpx.Client) -> None:
    """Callers go on while the layer changes under its name: they get the one or the other, or 404 in between, and nothing mixed."""
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
            assert http.put(f"/layers/{NAME}", json={"spec": spec}).status_code in (200, 201)
        assert http.delete(f"/layers/{NAME}").status_code == 204
    while len(seen) < 3 and not wrong:  # it must have happened, or this shows nothing
        http.put(f"/layers/{NAME}", json={"spec": SPECS[len(seen) % 2]})
        http.delete(f"/layers/{NAME}")
    over.set()
    for caller in callers:
        caller.join()
    assert not wrong
    assert seen == {*expected, "none"}


@pytest.mark.parametrize("name", ["../x", "%2e%2e%2fx", "a/b", "a%2fb", ".hidden", "", "a" * 65, "a%00"])
def test_names_cannot_leave_their_place(http: httpx.Client, name: str) -> None:
    """No name reaches a file."""
    assert http.put(f"/layers/{name}", json={"spec": SPECS[0]}).status_code in (404, 405, 422)
