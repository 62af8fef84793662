"""Visits to the page in a browser, each with a check of its console: no error, no violation of the policy, no request to another host."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.browser import Visit
from support.page import BeginVisit
from support.server import Server


@pytest.fixture
def begin_visit(browser: Any, server: Server) -> Iterator[BeginVisit]:
    """Opens the page; keywords are those of a browser's context. At the end, the console of every visit is checked."""
    visits: list[Visit] = []

    def begin(layer: str = "default", **context: Any) -> Visit:
        page = browser.new_context(**{"viewport": {"width": 1440, "height": 1000}, **context}).new_page()
        page.set_default_timeout(60000)  # milliseconds: on a busy machine the first picture takes long, since it imports matplotlib
        visits.append(Visit(page, server.url).begin(layer))
        return visits[-1]

    yield begin
    for one in visits:
        one.end()


@pytest.fixture(scope="session")
def layers(http: httpx.Client) -> Iterator[None]:
    """Layers of other shapes than `default`."""
    made = {
        "odd": {"d_model": 6, "num_heads": 2, "key_dim": 5, "value_dim": 7, "seed": 2},
        "wide": {"d_model": 48, "num_heads": 12, "seed": 3},
        "grouped": {"d_model": 16, "num_heads": 4, "num_kv_heads": 2, "softcap": 2.0, "alibi": True, "sinks": True, "seed": 4},
        "negative": {"d_model": 16, "num_heads": 2, "differential": {}, "seed": 5},
        "rotated": {
            "d_model": 16,
            "num_heads": 2,
            "rope": {},
            "qk_norm": {"kind": "rms"},
            "window": {"left": 3},
            "talking_heads": True,
            "output_gate": {},
            "seed": 6,
        },
        **{f"tiny-{number}": {"d_model": 8, "num_heads": 2, "seed": number} for number in (0, 2, 10)},
    }
    for name, spec in made.items():
        assert http.put(f"/layers/{name}", json={"spec": spec}).is_success
    yield
    for name in made:
        http.delete(f"/layers/{name}")
