"""Decoding on the page in a real browser: a sentence token by token, with a session of the server."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from support.browser import Visit
from support.page import WORDS, Visitor, weights_of
from support.server import Server

pytestmark = pytest.mark.browser


@pytest.fixture
def kept(http: httpx.Client) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """The sessions that the server has beyond those from before the test, which are deleted at its end."""

    def ids() -> list[dict[str, Any]]:
        return list(http.get("/sessions").json()["sessions"])

    before = [session["id"] for session in ids()]
    yield lambda: [session for session in ids() if session["id"] not in before]
    for session in ids():
        http.delete(f"/sessions/{session['id']}")


def button(visit: Visit) -> Any:
    return visit.page.locator("#decoding button")


def step(visit: Visit) -> dict[str, Any]:
    """Clicks on "Step"; the body that was sent, once its reply is shown."""
    status = visit.page.locator("#decoding .hint[role=status]")
    before = status.inner_text()
    with visit.page.expect_request("**/sessions/*/attend") as caught:
        button(visit).click()
    visit.page.wait_for_function("([e, before]) => e.textContent !== before", arg=[status.element_handle(), before])
    body: dict[str, Any] = caught.value.post_data_json
    return body


def shown(visit: Visit) -> tuple[list[str], Any]:
    """Heads of the columns, and the numbers [heads, keys]."""
    table = visit.page.locator("#decoding table")
    rows = table.locator("tbody tr").all()
    return table.locator("thead th").all_inner_texts(), np.array([row.locator("td").all_inner_texts() for row in rows], float)


@pytest.mark.parametrize("width", [390, 1280])
def test_each_step_shows_a_row_with_one_key_more(
    visit: Visitor, http: httpx.Client, kept: Callable[[], list[dict[str, Any]]], width: int
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = visit(viewport={"width": width, "height": 900})
    requested = page.request_sent_by(lambda: page.page.check("#causal"))
    weights = weights_of(http, requested)
    for count in range(1, len(WORDS) + 1):
        body = step(page)
        assert body["query"]["shape"] == [1, 64] and body["expected_length"] == count - 1
        words, numbers = shown(page)
        assert words == ["Head", *WORDS[:count]]
        np.testing.assert_allclose(numbers, weights[:, count - 1, :count], rtol=0, atol=0.0051)
        assert page.page.locator("#decoding .hint[role=status]").inner_text() == f"Token {count} of {len(WORDS)}: {WORDS[count - 1]}"
    [session] = kept()
    assert session["length"] == len(WORDS)
    assert page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    table = page.page.locator("#decoding .wide").bounding_box()
    newest = page.page.locator("#decoding thead th").last.bounding_box()
    assert newest["x"] + newest["width"] <= table["x"] + table["width"] + 1
    assert [rule["id"] for rule in Axe().run(page.page, context="#decoding").response["violations"]] == []

    assert button(page).inner_text() == "Start over"
    with page.page.expect_response(f"**/sessions/{session['id']}"):
        button(page).press("Enter")
    assert button(page).inner_text() == "Step" and kept() == []
    assert page.page.locator("#decoding .wide").is_hidden()


def test_a_window_and_separate_keys_and_values_are_those_of_the_request(visit: Visitor, http: httpx.Client, layers: None) -> None:
    page = visit("odd")
    page.request_sent_by(lambda: page.page.check("#causal"))
    weights = weights_of(http, page.request_sent_by(lambda: page.page.fill("#left", "1")))
    for count in (1, 2, 3):
        body = step(page)
        assert [body[name]["shape"] for name in ("query", "key", "value")] == [[1, 6], [1, 5], [1, 7]]
        np.testing.assert_allclose(shown(page)[1], weights[:, count - 1, :count], rtol=0, atol=0.0051)


def test_another_sentence_begins_anew(visit: Visitor, kept: Callable[[], list[dict[str, Any]]]) -> None:
    page = visit()
    step(page)
    with page.page.expect_response(lambda response: response.request.method == "DELETE"):
        page.request_sent_by(lambda: page.page.fill("#text", "one two"))
    assert page.page.locator("#decoding .wide").is_hidden() and kept() == []
    step(page)
    assert shown(page)[0] == ["Head", "one"]


def test_after_a_refused_step_nothing_of_the_session_is_shown(
    visit: Visitor, http: httpx.Client, kept: Callable[[], list[dict[str, Any]]]
) -> None:
    page = visit()
    step(page)
    step(page)
    [session] = kept()
    http.delete(f"/sessions/{session['id']}")

    button(page).click()
    page.page.locator("#decoding-error", has_text="the session has ended: it was deleted").wait_for()
    assert page.page.locator("#decoding .wide").is_hidden()
    assert page.page.locator("#decoding .hint[role=status]").inner_text() == ""
    step(page)
    assert shown(page)[0] == ["Head", WORDS[0]] and page.page.locator("#decoding-error").inner_text() == ""


def test_only_a_sentence_that_attends_to_itself_is_decoded(visit: Visitor) -> None:
    page = visit()
    assert page.page.locator("#decoding").is_visible()
    page.request_sent_by(lambda: page.page.check("#cross"))
    assert page.page.locator("#decoding").is_hidden()
    page.request_sent_by(lambda: page.page.uncheck("#cross"))
    page.request_sent_by(lambda: page.page.check("input[value=request]", force=True))
    assert page.page.locator("#decoding").is_hidden()


def test_a_server_without_sessions_offers_none(browser: Any, start: Callable[..., Server]) -> None:
    visit = Visit(browser.new_context().new_page(), start().url).begin()
    assert visit.page.locator("#decoding").is_hidden()
    visit.end()
