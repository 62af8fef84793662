"""Draws the figures of docs/heads.md again: `python docs/draw_examples.py [FOLDER]`. Vectors and layers are those of its examples."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from attend.cli.clients import in_process
from attend.settings import Settings
from attend.spec import LayerSpec


def examples() -> Iterator[tuple[str, LayerSpec, dict[str, Any], dict[str, Any]]]:
    """File name, layer, fields of the request, and figure."""
    words = ["the", "cat", "sat", "on", "the", "mat", "because", "it", "was", "tired"]
    x = np.random.RandomState(0).standard_normal((len(words), 64))
    fields = {"causal": True, "tokens": {"query": words}}
    for size in (1, 3):
        title = f"Causal heads, input times {size}"
        yield f"entropy-{size}", _layer(seed=1), {"query": size * x, **fields}, {"kind": "heads", "title": title}

    stream = np.random.RandomState(2)
    kinds = ["det", "noun", "verb"] * 4
    topics = ["sea" if draw < 0.5 else "law" for draw in stream.random_sample(12)]
    meaning = {word: stream.standard_normal(64) for word in ("det", "noun", "verb", "sea", "law")}
    angles = np.arange(12)[:, None] / 10000 ** (np.arange(32) / 32)
    sequences = {
        "syntactic": (kinds, np.stack([meaning[kind] for kind in kinds]) + 0.3 * stream.standard_normal((12, 64))),
        "semantic": (topics, np.stack([meaning[topic] for topic in topics]) + 0.3 * stream.standard_normal((12, 64))),
        "positional": ([str(i) for i in range(12)], np.concatenate((np.sin(angles), np.cos(angles)), 1)),
    }
    for name, (tokens, vectors) in sequences.items():
        fields = {"query": vectors, "causal": True, "tokens": {"query": tokens}}
        yield name, _layer(seed=3), fields, {"kind": "heads", "title": f"Heads on a {name} sequence"}

    x = np.random.RandomState(4).standard_normal((9, 64))
    yield "concatenation", _layer(seed=5), {"query": x}, {"kind": "concatenation", "title": "Heads side by side, and their projection"}

    x = np.random.RandomState(6).standard_normal((10, 64))
    for heads in (1, 4):
        title = "One head of the full width" if heads == 1 else "The same matrices as four heads"
        yield f"heads-{heads}", _layer(seed=7, heads=heads), {"query": x}, {"kind": "heads", "title": title}


def _layer(seed: int, heads: int = 4) -> LayerSpec:
    return LayerSpec(d_model=64, num_heads=heads, seed=seed, dtype="float64")


def draw_examples(folder: Path) -> None:
    """Writes each figure into the folder."""
    with in_process(Settings()) as client:
        for name, spec, fields, figure in examples():
            client.put_layer("analysed", spec)
            figure = {**figure, "dpi": 96, "width": 720, "values": False}
            (folder / f"{name}.png").write_bytes(client.figure(**fields, layer="analysed", figure=figure))


if __name__ == "__main__":
    draw_examples(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "heads")
