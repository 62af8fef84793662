"""The parts of the page at GET / in a browser: its words, and the cells of its heat map."""

from collections.abc import Callable
from typing import Any

import httpx
import numpy as np

from support.browser import SENTENCE, Visit

WORDS = SENTENCE.split()
BeginVisit = Callable[..., Visit]


def weights_of(http: httpx.Client, body: dict[str, Any]) -> np.ndarray[Any, Any]:
    """What the service answers to the request that the page sent, [heads, queries, keys]."""
    reply = http.post("/attend", json={**body, "outputs": ["attention_weights"]})
    assert reply.status_code == 200, reply.text
    return np.array(reply.json()["attention_weights"])


class Grid:
    """Where the cells of the heat map are on the screen: found by pointing, from the last cell to where the tooltip changes its words."""

    def __init__(self, visit: Visit, queries: int, keys: int) -> None:
        self.visit, self.queries, self.keys = visit, queries, keys
        visit.page.locator("#matrix").scroll_into_view_if_needed()
        box = visit.page.locator("#matrix canvas").bounding_box()
        self.right, self.bottom = box["x"] + box["width"] - 1, box["y"] + box["height"] - 1
        self.size = 2
        visit.page.mouse.move(self.right - 2, self.bottom - 2)
        _, last = tip(visit)
        while tip(visit)[1] == last:
            self.size += 1
            visit.page.mouse.move(self.right - self.size, self.bottom - 2)

    def at(self, q: float, k: float) -> tuple[float, float]:
        return self.right - (self.keys - k - 0.5) * self.size, self.bottom - (self.queries - q - 0.5) * self.size

    def hover(self, q: float, k: float) -> None:
        self.visit.page.mouse.move(*self.at(q, k))

    def click(self, q: float, k: float) -> None:
        self.visit.page.mouse.click(*self.at(q, k))


def tip(visit: Visit) -> tuple[float, str]:
    """The tooltip: number and words."""
    box = visit.page.locator("#tip")
    box.wait_for()
    return float(box.locator("strong").inner_text()), box.locator("span").inner_text()


def side(visit: Visit, axis: str) -> Any:
    """The words on one side: "q" or "k"."""
    return visit.page.locator(f"#words ul[data-axis={axis}] button")


def numbers_beside(visit: Visit, axis: str) -> list[float]:
    """The weights written beside the words of one side; 0 where none is."""
    return [float(weight or 0) for weight in side(visit, axis).evaluate_all("all => all.map((one) => one.dataset.weight)")]
