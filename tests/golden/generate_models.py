"""Attention layers of tiny models of transformers, as their config.json and eager attention have them, for `models/NAME.json`.

One file holds a config.json and, for each kind of layer that it describes, the shapes of the layer's tensors in the model's file (their
numbers are `tiny_models.drawn`), what went into the layer and what came out. Run as `python generate_models.py [--check] [NAME …]` in an
environment with the project, torch==2.13.0 and transformers==5.23.0: it writes the files, or compares with what is there.
"""

import json
import sys
from pathlib import Path

import numpy as np
from casefile import array, tensor
from model_variants import SIZES, VARIANTS
from tiny_models import TinyModel, tiny_config

from attend.attention.reference.forward import attend, every_output
from attend.checkpoints.families import FAMILIES, number_of_layers
from attend.checkpoints.model import describe, parts_of, read_model_layer
from attend.errors import InvalidRequest
from attend.spec import LayerSpec

FOLDER = Path(__file__).parent / "models"
PARTS = (
    ("query_down.weight", "query.weight", "qkv.weight"),
    ("key.weight", "kv.weight", "qkv.weight", "down.weight"),
    ("value.weight", "kv.weight", "qkv.weight", "down.weight"),
    ("output.weight",),
)
OTHER_LAYERS = ("/config/layer_types", "/config/indexer_types", "/config/layers_block_type", "dense_bias", "/config/cross_attention_")
MOST_KINDS = 3  # of layers of one part that are kept
TOLERANCE = 3e-5  # of the largest value


def layers_of(config):
    """(layer, part) of every attention layer."""
    return [(n, part) for part, (inner, attention) in parts_of(config).items() for n in range(number_of_layers(attention, inner))]


def is_causal(described, config):
    """BERT's layers may be those of a decoder."""
    return described.row.causal or (described.part == "encoder" and bool(config.get("is_decoder")))


def tied_rows(spec, weights, inputs):
    """bool [1, n]: the rows whose last selected key has the index score of one that is not selected: torch.topk selects any of the two."""
    values, top_k = every_output(spec, weights, query=inputs, causal=True), spec.indexer.top_k
    products = np.clip(values["index_query"] @ values["index_key"][:, None].swapaxes(2, 3), 0, None)
    scores = np.einsum("bhqk,bqh->bqk", products, values["index_factors"])
    best = -np.sort(-np.where(np.tri(inputs.shape[1], dtype=bool), scores, -np.inf))
    return (best[..., top_k - 1] == best[..., top_k]) & np.isfinite(best[..., top_k - 1])


def compare(config, in_memory=False):
    """(layer, part) -> ("refused", why) or ("right" | "wrong", (shapes, query, key, output)). `in_memory`: see TinyModel."""
    model, verdicts, loaded, modules = TinyModel(config, in_memory), {}, {}, {}
    for layer in layers_of(config):
        try:
            described = describe(config, *layer)
            tensors = {name: model.tensors[name] for name in described.tensors(model.tensors)}
            fields, weights = read_model_layer(tensors, config, *layer)
        except InvalidRequest as refusal:
            verdicts[layer] = "refused", str(refusal)
            continue
        names = described.find(tensors).names
        modules[layer] = tuple(model.module(tensors[next(names[part] for part in parts if part in names)]) for parts in PARTS)
        loaded[layer] = LayerSpec.model_validate(fields), weights, tensors, described
    for layer, seen in model.run(modules).items():
        if not seen:  # such as a tower for images, in a run on tokens
            continue
        spec, weights, tensors, described = loaded[layer]
        if spec.rope and spec.rope.axes:
            shape = (seen["query"].shape[1], spec.rope.num_axes)
            seen["positions"] = next(positions for positions in model.positions if positions.shape[1:] == shape)
        inputs = {name: seen[name] for name in ("query", "key", "value", "positions", "bias") if name in seen}
        ours = attend(spec, weights, **inputs, causal=is_causal(described, config)).output
        largest, errors = np.abs(seen["output"]).max(), np.abs(ours - seen["output"])
        if spec.indexer:
            errors = errors[~tied_rows(spec, weights, seen["query"])]
        right = np.isfinite(largest) and largest > 1e-3 and errors.max() <= TOLERANCE * largest
        verdicts[layer] = "right" if right else "wrong", (described, {name: x.shape for name, x in tensors.items()}, seen)
    return verdicts


def document(config):
    """The file of a model: one case for each kind of layer. Raises AssertionError if a layer is wrong, or refused for another reason than
    that it has no attention.
    """
    cases, kinds = [], set()
    for (number, part), (verdict, found) in compare(config).items():
        if verdict == "refused" and any(word in found for word in OTHER_LAYERS):
            continue
        assert verdict == "right", f"layer {number} of the {part}: {verdict} {found if verdict == 'refused' else ''}"
        described, shapes, seen = found
        if (kind := json.dumps([part, described.fields])) in kinds or sum(kind.startswith(f'["{part}"') for kind in kinds) == MOST_KINDS:
            continue
        kinds.add(kind)
        request = {"query": tensor(seen["query"])}
        for name, default in (("key", "query"), ("value", "key")):
            if not np.array_equal(seen[name], seen[default]):
                request |= {"key": tensor(seen["key"]), name: tensor(seen[name])}
        request |= {name: tensor(seen[name]) for name in ("positions", "bias") if name in seen}
        request["causal"] = is_causal(described, config)
        case = {"layer": number, "part": part, "shapes": {name: list(shape) for name, shape in shapes.items()}}
        cases.append(case | {"request": request, "output": tensor(seen["output"])})
    assert cases, "no layer has attention"
    return {"config": config, "cases": cases}


def same(old, new):
    """Whether two documents agree: numbers to 1e-5 of the largest, but at least of 1, as processors round differently; the rest exactly."""
    if isinstance(old, dict) and "base64" in old and isinstance(new, dict) and "base64" in new:
        largest = max(1.0, float(np.abs(array(old)).max(initial=0)))
        return old["shape"] == new["shape"] and np.allclose(array(old), array(new), rtol=0, atol=1e-5 * largest)
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(same(old[key], new[key]) for key in old)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(same, old, new))
    return old == new


def main():
    chosen = [name for name in sys.argv[1:] if not name.startswith("-")]
    failed = []
    for name, (model_type, changes) in ({name: (name, {}) for name in FAMILIES} | VARIANTS).items():
        if chosen and name not in chosen:
            continue
        path = FOLDER / f"{name}.json"
        try:
            made = document(tiny_config(model_type, SIZES.get(model_type, {}) | changes))
        except Exception as error:
            failed.append(name)
            print(f"{name}: {type(error).__name__} {error}", flush=True)
            continue
        if "--check" in sys.argv:
            if not same(json.loads(path.read_text()), made):
                failed.append(name)
                print(f"{name}: differs")
        else:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(json.dumps(made, separators=(",", ":")) + "\n")
            print(f"{name}: {len(made['cases'])} cases, {path.stat().st_size} bytes", flush=True)
    print(f"{len(failed)} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
