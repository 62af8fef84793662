"""Chromium on the page, and a record of the errors in its console and of what it fetched."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

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
    """One visit to the page of a server. `refused` are the statuses of replies that were refusals, which Chromium also complains of."""

    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)

    def open(self) -> None:
        """Opens the page."""
        page = self.page
        page.add_init_script(BREACHES)
        page.on("console", lambda message: self.complaints.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.fetched.append(request.url))
        page.on("response", lambda response: self.refused.append(response.status) if response.status >= 400 else None)
        page.goto(self.url + "/")

    def begin(self, layer: str = "default") -> "Visit":
        """Opens the page and takes a layer."""
        self.open()
        page = self.page
        page.locator("#result[aria-busy=false] #heads button").first.wait_for()
        if page.locator("#layer").input_value() != layer:
            self.asking(lambda: page.select_option("#layer", layer))
        return self

    def asking(self, act: Any) -> dict[str, Any]:
        """Does something that makes the page ask /attend, and waits until the answer is shown; what was asked."""
        with self.page.expect_response("**/attend") as caught:
            act()
        self.page.locator("#result[aria-busy=false]").wait_for()
        body: dict[str, Any] = caught.value.request.post_data_json
        return body

    def refusal(self, act: Any, path: str = "**/attend") -> None:
        """Does something that the service refuses."""
        with self.page.expect_response(path) as caught:
            act()
        assert caught.value.status >= 400
        self.page.locator("#result[aria-busy=false]").wait_for()

    def end(self) -> None:
        """Nothing was complained of but refusals, and nothing came from elsewhere."""
        ours = [text for text in self.complaints if not text.startswith("Failed to load resource")]
        assert ours == [] and len(self.complaints) - len(ours) == len(self.refused)
        assert self.fetched and [url for url in self.fetched if not url.startswith((self.url, "blob:" + self.url))] == []
        self.page.context.close()
