"""Chromium on the page, and a record of the errors in its console and of what it fetched."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from playwright.sync_api import Browser, Page, sync_playwright

SENTENCE = "The cat sat on the mat because it was tired"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
BREACHES = "addEventListener('securitypolicyviolation', (event) => console.error('breach', event.violatedDirective, event.blockedURI))"


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        yield browser
        browser.close()


@dataclass
class Visit:
    """One visit to the page of a server. `refused` are the statuses of refusals, which Chromium also writes to its console."""

    page: Page
    url: str
    console_errors: list[str] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)

    def open(self, state: str = "") -> None:
        """Opens the page with this state in its address."""
        page = self.page
        page.add_init_script(BREACHES)
        page.on("console", lambda message: self.console_errors.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.console_errors.append(str(error)))
        page.on("request", lambda request: self.fetched.append(request.url))
        page.on("response", lambda response: self.refused.append(response.status) if response.status >= 400 else None)
        page.goto(f"{self.url}/{state and f'#{state}'}")

    def begin(self, layer: str = "default") -> "Visit":
        """Opens the page with SENTENCE and this layer."""
        self.open(urlencode({"layer": layer, "text": SENTENCE}))
        page = self.page
        page.locator("#result[aria-busy=false] #heads button").first.wait_for()
        return self

    def request_sent_by(self, act: Any) -> dict[str, Any]:
        """The body of the request to /attend that `act` makes the page send. Waits until the reply is shown."""
        with self.page.expect_response("**/attend") as caught:
            act()
        self.page.locator("#result[aria-busy=false]").wait_for()
        body: dict[str, Any] = caught.value.request.post_data_json
        return body

    def refusal(self, act: Any, path: str = "**/attend") -> None:
        """Runs `act`, which makes the page send a request that the service refuses, and waits until the refusal is shown."""
        with self.page.expect_response(path) as caught:
            act()
        assert caught.value.status >= 400
        self.page.locator("#result[aria-busy=false]").wait_for()

    def end(self) -> None:
        """Asserts that the console has no errors but refusals, and that every file is from this server. Closes the page."""
        ours = [text for text in self.console_errors if not text.startswith("Failed to load resource")]
        assert ours == [] and len(self.console_errors) - len(ours) == len(self.refused)
        assert self.fetched and [url for url in self.fetched if not url.startswith((self.url, "blob:" + self.url))] == []
        self.page.context.close()
