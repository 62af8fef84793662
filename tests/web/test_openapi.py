"""/docs in a real browser: its examples can be executed, and it loads nothing from other servers."""

import shutil

import pytest

from support.server import Server

pytestmark = pytest.mark.browser


def test_the_readmes_example_can_be_executed_on_the_page(server: Server) -> None:
    """PUT /layers/tiny, then POST /attend, each by its Execute button."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        page, console_errors, fetched = browser.new_page(), [], []
        page.on("console", lambda message: console_errors.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: fetched.append(request.url))
        page.goto(server.url + "/docs")
        statuses = []
        for operation in ("#operations-layers-put_layer", "#operations-attend-attend"):
            block = page.locator(operation)
            block.locator(".opblock-summary").first.click()
            if "put" in operation:
                block.locator("input[placeholder='name']").fill("tiny")
            block.locator(".btn.execute").click()
            status = block.locator(".live-responses-table .response-col_status").nth(1)
            status.wait_for()
            statuses.append(status.inner_text().split()[0])
        browser.close()

    assert statuses[0] in ("200", "201")
    assert statuses[1] == "200"
    assert console_errors == []
    assert fetched
    assert [url for url in fetched if not url.startswith(server.url)] == []
