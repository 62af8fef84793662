"""The page of a server with keys, in a real browser: it requests a key, shows why one is refused, and stores the right one in its tab."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attend.web.keys import Key, make_key, write_keys
from support.browser import Visit
from support.server import Server, fork_server

pytestmark = pytest.mark.browser


class Guarded:
    """A server with a key that may call, and one that may only read metrics."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "keys.txt"
        (self.secret, self.key), (self.other, self.others) = make_key("caller", ["infer"]), make_key("watcher", ["metrics"])
        self.set_keys(self.key, self.others)
        self.server: Server = fork_server("--keys-file", str(self.file))

    def set_keys(self, *keys: Key) -> None:
        """Replaces the keys in the file."""
        write_keys(self.file, keys)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    one = Guarded(tmp_path_factory.mktemp("keys"))
    yield one
    one.server.stop()


@pytest.fixture
def visit(browser: Any, guarded: Guarded) -> Iterator[Visit]:
    """A new tab, whose console is checked at the end. `sent` of the page has the Authorization of each request."""
    guarded.set_keys(guarded.key, guarded.others)
    page = browser.new_context(permissions=["clipboard-read", "clipboard-write"]).new_page()
    page.set_default_timeout(20000)
    one = Visit(page, guarded.server.url)
    yield one
    one.end()


def error(visit: Visit) -> str:
    """The message at the field, once there is one."""
    message: str = visit.page.locator("#api-key-error:not(:empty)").inner_text()
    return message


def enter(visit: Visit, key: str) -> None:
    """Types a key; returns after the first reply, or, if the key is accepted, after the following one."""
    with visit.page.expect_response("**/layers"):
        visit.page.fill("#api-key", key)
        visit.page.press("#api-key", "Enter")


def shown(visit: Visit) -> None:
    """Waits for the weights."""
    visit.page.locator("#result[aria-busy=false] #heads button").first.wait_for()


def test_the_page_requests_a_key_and_shows_why_one_is_refused(visit: Visit, guarded: Guarded) -> None:
    """No key, an unknown one, one with the wrong scope, one that a header cannot contain; then the right one."""
    page = visit.page
    visit.open()
    assert "requires a key" in error(visit)
    assert page.locator("#api-key").get_attribute("aria-invalid") == "true" and page.locator("#api-key").get_attribute("type") == "password"
    assert page.locator("#heads button").count() == 0 and page.locator("#problem").is_hidden()

    enter(visit, "attend-nobody-has-this")
    page.locator("#api-key-error", has_text="does not know the key").wait_for()
    enter(visit, guarded.other)
    page.locator("#api-key-error", has_text='a key with the scope infer, got "watcher" with metrics').wait_for()
    page.fill("#api-key", "schlüssel €")
    page.press("#api-key", "Enter")
    page.locator("#api-key-error", has_text="does not know the key").wait_for()

    enter(visit, guarded.secret)
    shown(visit)
    assert page.locator("#api-key-error").inner_text() == "" and page.locator("#api-key").get_attribute("aria-invalid") is None
    assert set(visit.refused) == {401, 403}


def test_the_key_is_stored_in_the_tab_alone(visit: Visit, guarded: Guarded) -> None:
    """It is a Bearer token of every request, kept after a reload, unknown to other tabs, and in no address, cookie or lasting store."""
    page = visit.page
    sent: list[str | None] = []
    page.on("request", lambda request: sent.append(request.headers.get("authorization")) if "/page/" not in request.url else None)
    visit.open()
    error(visit)
    sent.clear()
    enter(visit, guarded.secret)
    shown(visit)
    with page.expect_download() as download:
        page.click("[data-figure=svg]")
    assert Path(download.value.path()).read_bytes().startswith(b"<?xml")
    assert set(sent) - {None} == {f"Bearer {guarded.secret}"} and sent.count(None) <= 1  # the blob that is downloaded

    visit.page.reload()
    shown(visit)
    assert page.locator("#api-key").is_visible()
    assert page.context.cookies() == [] and page.evaluate("JSON.stringify(localStorage)") == "{}"
    assert not any(guarded.secret in url for url in visit.fetched)
    beside = page.context.new_page()
    beside.goto(guarded.server.url + "/")
    beside.locator("#api-key-error", has_text="requires a key").wait_for()


def test_after_a_key_is_removed_the_page_requests_another(visit: Visit, guarded: Guarded) -> None:
    """At the next request; the earlier result is greyed and inert."""
    visit.open()
    enter(visit, guarded.secret)
    shown(visit)

    guarded.set_keys(guarded.others)
    visit.refusal(lambda: visit.page.click("#go"))

    assert "does not know the key" in error(visit)
    assert visit.page.locator("#shown[inert]").count() == 1


def test_copied_code_reads_the_key_from_the_environment(visit: Visit, guarded: Guarded) -> None:
    """The command and the program read it from the variable that the service's own commands read, and work."""
    page = visit.page
    visit.open()
    enter(visit, guarded.secret)
    shown(visit)
    copied = {}
    for kind in ("json", "curl", "python"):
        page.click(f"[data-copy={kind}]")
        page.locator("#export-status", has_text="Copied the " + {"json": "JSON", "curl": "curl", "python": "Python"}[kind]).wait_for()
        copied[kind] = page.evaluate("navigator.clipboard.readText()")
        assert guarded.secret not in copied[kind]

    environment = {**os.environ, "ATTEND_API_KEY": guarded.secret}
    done = subprocess.run(["bash", "-c", copied["curl"]], capture_output=True, check=True, env=environment)
    weights = np.array(json.loads(done.stdout)["attention_weights"])
    done = subprocess.run([sys.executable, "-c", copied["python"]], capture_output=True, check=True, env=environment)
    assert done.stdout.decode().strip() == str(weights.shape)
    heads, queries, _ = weights.shape
    assert page.locator("#summary").inner_text().startswith(f"{heads} heads, {queries} queries ")


def test_without_keys_the_page_requests_none(browser: Any, server: Server) -> None:
    """The page sends none either."""
    page = browser.new_context().new_page()
    sent: list[str | None] = []
    page.on("request", lambda request: sent.append(request.headers.get("authorization")))
    visit = Visit(page, server.url).begin()
    assert page.locator("#api-key").is_hidden() and set(sent) == {None}
    visit.end()
