"""Draws the README's pictures again: `python docs/draw_pictures.py [FOLDER]`.

All are of the demo's sentence in the small model: two pictures that POST /attend/figure draws, and a photograph of the page, which needs
Playwright and Chromium.
"""

import shutil
import sys
from pathlib import Path

from attend.cli.clients import child_server, in_process
from attend.cli.demo import SENTENCE
from attend.serving.words.small import SmallModel
from attend.settings import Settings

PICTURES = {
    "heads.png": {
        "kind": "heads",
        "heads": [1, 2, 3],
        "width": 1000,
        "values": False,
        "title": f"Three heads of the first layer of a small model: “{SENTENCE}”",
    },
    "similarity.png": {"kind": "similarity", "width": 520, "title": "How similarly its four heads attend"},
}


def draw_pictures(folder: Path) -> None:
    """Writes each picture into the folder."""
    read = SmallModel().read(SENTENCE, 0)
    with in_process(Settings()) as client:
        client.put_layer(read.layer, read.spec, read.weights)
        for name, figure in PICTURES.items():
            sent = {"layer": read.layer, "tokens": {"query": read.tokens}, **read.options}
            picture = client.figure(read.vectors, **sent, figure={**figure, "dpi": 96})
            (folder / name).write_bytes(picture)


def photograph_page(file: Path) -> None:
    """Writes a picture of the page in a browser as it opens, with the link of the last word locked."""
    from playwright.sync_api import sync_playwright

    with child_server() as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1190})
        page.goto(f"{url}/#special=1&cell=11,5")
        page.locator("#numbers tbody tr").first.wait_for()
        page.screenshot(path=file)
        browser.close()


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    draw_pictures(target)
    photograph_page(target / "page.png")
