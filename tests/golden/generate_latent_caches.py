"""What transformers' caches keep of the keys of latent attention, for `caches/latent.json`: latent vectors, the rotated numbers that
all heads share, and the keys of indexers. The models and inputs are those of `models/`.

Run as `python generate_latent_caches.py [--check]` in the environment of `generate_models.py`: it writes the file, or compares with it.
"""

import json
import sys
from pathlib import Path

import torch
from casefile import tensor
from generate_models import FOLDER, same
from tiny_models import IDS, TinyModel

FILE = Path(__file__).parent / "caches" / "latent.json"


def cached(document):
    """The cache of the layer of a file's first case."""
    case, model = document["cases"][0], TinyModel(document["config"]).model
    with torch.no_grad():
        layers = model(input_ids=IDS, use_cache=True).past_key_values.layers
    layer = layers[case["layer"]]
    kept = {"latent": layer.keys[:, 0], "rope_key": layer.values[:, 0], "index_key": getattr(layer, "indexer_keys", None)}
    return {name: tensor(x.numpy()) for name, x in kept.items() if x is not None}


def main():
    documents = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
    latent = {name: x for name, x in documents.items() if any("kv_a_" in tensor for tensor in x["cases"][0]["shapes"])}
    made = {name: cached(x) for name, x in latent.items()}
    if "--check" in sys.argv:
        sys.exit(not same(json.loads(FILE.read_text()), made))
    FILE.write_text(json.dumps(made, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
