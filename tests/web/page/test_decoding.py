"""Decoding on the page in a real browser: a sentence token by token, with a session of the server."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from support.browser import Visit
from support.page import WORDS, BeginVisit, weights_of
from support.server import Server

pytestmark = pytest.mark.browser


@pytest.fixture
def new_sessions(http: httpx.Client) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Returns the sessions that were created since the start of the test. All sessions are deleted at its end."""

    def all_sessions() -> list[dict[str, Any]]:
        return list(http.get("/sessions").json()["sessions"])

    before = [session["id"] for session in all_sessions()]
    yield lambda: [session for session in all_sessions() if session["id"] not in before]
    for session in all_sessions():
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
    begin_visit: BeginVisit, http: httpx.Client, new_sessions: Callable[[], list[dict[str, Any]]], width: int
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    visit = begin_visit(viewport={"width": width, "height": 900})
    requested = visit.request_sent_by(lambda: visit.page.check("#causal"))
    weights = weights_of(http, requested)
    for count in range(1, len(WORDS) + 1):
        body = step(visit)
        assert body["query"]["shape"] == [1, 64] and body["expected_length"] == count - 1
        words, numbers = shown(visit)
        assert words == ["Head", *WORDS[:count]]
        np.testing.assert_allclose(numbers, weights[:, count - 1, :count], rtol=0, atol=0.0051)
        assert visit.page.locator("#decoding .hint[role=status]").inner_text() == f"Token {count} of {len(WORDS)}: {WORDS[count - 1]}"
    [session] = new_sessions()
    assert session["length"] == len(WORDS)
    assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    table = visit.page.locator("#decoding .wide").bounding_box()
    newest = visit.page.locator("#decoding thead th").last.bounding_box()
    assert newest["x"] + newest["width"] <= table["x"] + table["width"] + 1
    assert [rule["id"] for rule in Axe().run(visit.page, context="#decoding").response["violations"]] == []

    assert button(visit).inner_text() == "Start over"
    with visit.page.expect_response(f"**/sessions/{session['id']}"):
        button(visit).press("Enter")
    assert button(visit).inner_text() == "Step" and new_sessions() == []
    assert visit.page.locator("#decoding .wide").is_hidden()


def test_a_window_and_separate_keys_and_values_are_those_of_the_request(begin_visit: BeginVisit, http: httpx.Client, layers: None) -> None:
    visit = begin_visit("odd")
    visit.request_sent_by(lambda: visit.page.check("#causal"))
    weights = weights_of(http, visit.request_sent_by(lambda: visit.page.fill("#left", "1")))
    for count in (1, 2, 3):
        body = step(visit)
        assert [body[name]["shape"] for name in ("query", "key", "value")] == [[1, 6], [1, 5], [1, 7]]
        np.testing.assert_allclose(shown(visit)[1], weights[:, count - 1, :count], rtol=0, atol=0.0051)


def test_another_sentence_starts_a_new_session(begin_visit: BeginVisit, new_sessions: Callable[[], list[dict[str, Any]]]) -> None:
    visit = begin_visit()
    step(visit)
    with visit.page.expect_response(lambda response: response.request.method == "DELETE"):
        visit.request_sent_by(lambda: visit.page.fill("#text", "one two"))
    assert visit.page.locator("#decoding .wide").is_hidden() and new_sessions() == []
    step(visit)
    assert shown(visit)[0] == ["Head", "one"]


def test_after_a_refused_step_nothing_of_the_session_is_shown(
    begin_visit: BeginVisit, http: httpx.Client, new_sessions: Callable[[], list[dict[str, Any]]]
) -> None:
    visit = begin_visit()
    step(visit)
    step(visit)
    [session] = new_sessions()
    http.delete(f"/sessions/{session['id']}")

    button(visit).click()
    visit.page.locator("#decoding-error", has_text="the session has ended: it was deleted").wait_for()
    assert visit.page.locator("#decoding .wide").is_hidden()
    assert visit.page.locator("#decoding .hint[role=status]").inner_text() == ""
    step(visit)
    assert shown(visit)[0] == ["Head", WORDS[0]] and visit.page.locator("#decoding-error").inner_text() == ""


def test_decoding_warns_where_words_attend_to_later_ones(begin_visit: BeginVisit) -> None:
    visit = begin_visit()
    warning = visit.page.locator("#decoding .note.warn")
    assert "attend to later ones" in warning.inner_text()
    visit.request_sent_by(lambda: visit.page.check("#causal"))
    assert warning.is_hidden()
    visit.request_sent_by(lambda: visit.page.select_option("#layer", "small-layer-1"))
    assert warning.is_hidden() and visit.page.locator("#decoding").is_visible()


def test_only_a_sentence_that_attends_to_itself_is_decoded(begin_visit: BeginVisit) -> None:
    visit = begin_visit()
    assert visit.page.locator("#decoding").is_visible()
    visit.request_sent_by(lambda: visit.page.check("#cross"))
    assert visit.page.locator("#decoding").is_hidden()
    visit.request_sent_by(lambda: visit.page.uncheck("#cross"))
    visit.request_sent_by(lambda: visit.page.check("input[value=request]", force=True))
    assert visit.page.locator("#decoding").is_hidden()


def test_a_server_without_sessions_offers_none(browser: Any, start: Callable[..., Server]) -> None:
    visit = Visit(browser.new_context().new_page(), start().url).begin()
    assert visit.page.locator("#decoding").is_hidden()
    visit.end()
