"""The examples of docs/heads.md print the output that the page shows below them."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from support.server import Server

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "heads.md").read_text()
EXAMPLES = re.findall(r"### ([^\n]*)\n.*?```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


def test_every_example_has_its_output() -> None:
    """So the test below runs every block of Python."""
    assert len(EXAMPLES) == PAGE.count("```python") == 4


@pytest.mark.parametrize(("code", "shown"), [(code, shown) for _, code, shown in EXAMPLES], ids=[title for title, _, _ in EXAMPLES])
def test_an_example_prints_the_output_on_the_page(server: Server, code: str, shown: str) -> None:
    """In a new interpreter, as pasted."""
    code = code.replace("http://127.0.0.1:8000", server.url)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout == shown


def test_the_script_draws_the_committed_figures(tmp_path: Path) -> None:
    """Pixel for pixel; 2 % may differ, since versions of the font renderer draw letters differently. The page shows each figure."""
    runpy.run_path(str(DOCS / "draw_examples.py"))["draw_examples"](tmp_path)

    others = [f"{path.stem}.png" for path in (DOCS / "heads").glob("effects-*.png")]  # of trained models, which differ between processors
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert sorted([*drawn, *others]) == sorted(re.findall(r"\(heads/([\w-]+\.png)\)", PAGE))
    for name in drawn:
        ours, committed = imread(tmp_path / name), imread(DOCS / "heads" / name)
        assert ours.shape == committed.shape
        assert (np.abs(ours - committed) > 0.02).any(-1).mean() < 0.02


@pytest.mark.slow  # trains three models; the extra `test` does not install transformers
def test_the_trained_models_have_the_heads_that_the_page_describes(tmp_path: Path) -> None:
    found = runpy.run_path(str(DOCS / "head_effects.py"))["main"](tmp_path)

    repeats, givers, translation = (found[name] for name in ("repeats", "givers", "translation"))
    assert repeats["previous"][0].max() > 0.5 > repeats["previous"][1].max()
    assert repeats["induction"][1].max() > 0.6 > repeats["induction"][0].max()
    assert repeats["effects"].max() < 0 and repeats["effects"].min() < -0.3
    assert givers["patched"].min() < -3
    head = np.unravel_index(givers["patched"].argmin(), givers["patched"].shape)
    assert givers["direct"][head] > 0
    assert translation["translated"] == "le chat rouge voit un cheval jeune"
    assert translation["ahead"].startswith("le rouge chat voit")
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (DOCS / "heads").glob("effects-*.png")}
