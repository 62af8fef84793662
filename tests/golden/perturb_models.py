"""Changes each field of the configs of tiny models: what changes transformers' eager attention has to change ours too, or be refused.

Run as `python perturb_models.py [--record] [NAME …]` where `generate_models.py` runs, for all models or those named. It prints every change
after which a layer is wrong, and for each model how many changes led to what: right, refused, or not built by transformers itself. With
`--record` it keeps that in `perturbed.txt`, which a test compares with the models there are.
"""

import copy
import json
import re
import sys
from collections import Counter
from pathlib import Path

from generate_models import FOLDER, compare, layers_of

from service.checkpoints.model import describe
from service.errors import InvalidRequest

RECORD = Path(__file__).parent / "perturbed.txt"

REMOVED = object()
KEPT = re.compile(  # what the model is, and settings of training, generation and output
    r"^(model_type|(torch_)?dtype|architectures|vocab_size|num_hidden_layers|n_layers?|problem_type|return_dict|use_cache|output_\w+)$|"
    r"dropout|pdrop|token_id|initializer|id2label|label2id|chunk_size_feed_forward|is_(encoder_)?decoder|tie_word|router_\w+_coef"
)


def alternatives(value):
    """Other values of a field, among them its absence."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value * 2 or 1
    elif isinstance(value, float):
        yield value * 2 or 0.5
    elif value is None:
        yield 3
        yield True
    elif isinstance(value, list):
        yield value[::-1]
    yield REMOVED


def places(fields, *above):
    """The path of each field, also inside of others."""
    for name, value in fields.items():
        if not KEPT.search(name):
            yield (*above, name), value
            if isinstance(value, dict):
                yield from places(value, *above, name)


def changed(config, path, value):
    config = copy.deepcopy(config)
    inner = config
    for name in path[:-1]:
        inner = inner[name]
    if value is REMOVED:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return config


def verdict(config):
    """wrong if any layer is, right if some are and none is wrong, else refused or not built."""
    try:
        if not any(is_described(config, *layer) for layer in layers_of(config)):
            return "refused"
        found = {kind for kind, _ in compare(config).values()}
    except InvalidRequest:
        return "refused"
    except Exception:  # transformers has no such model
        return "not built"
    return next((kind for kind in ("wrong", "right", "refused") if kind in found), "not built")


def is_described(config, *layer):
    """Whether the layer is not refused by the config alone, for which no model has to be built."""
    try:
        describe(config, *layer)
    except InvalidRequest:
        return False
    return True


def perturb(name):
    """(number of changes by verdict, those that are wrong) for a model of `models`."""
    config, counts, wrong = json.loads((FOLDER / f"{name}.json").read_text())["config"], Counter(), []
    for path, value in places(config):
        for other in alternatives(value):
            kind = verdict(changed(config, path, other))
            counts[kind] += 1
            if kind == "wrong":
                wrong.append(f"{'/'.join(path)}: {'removed' if other is REMOVED else other}")
    return counts, wrong


def record(name, counts):
    """Replaces the line of this model in the record; drops those of models that are no more."""
    lines = dict(line.split(": ") for line in RECORD.read_text().splitlines()) if RECORD.exists() else {}
    lines[name] = ", ".join(f"{kind} {counts[kind]}" for kind in ("right", "refused", "not built", "wrong") if counts[kind])
    kept = sorted(lines.keys() & {path.stem for path in FOLDER.glob("*.json")})
    RECORD.write_text("".join(f"{name}: {lines[name]}\n" for name in kept))


def main():
    chosen = [name for name in sys.argv[1:] if not name.startswith("-")]
    total, failed = Counter(), False
    for name in chosen or sorted(path.stem for path in FOLDER.glob("*.json")):
        counts, wrong = perturb(name)
        total, failed = total + counts, failed or bool(wrong)
        print(name, dict(counts), *wrong, sep="\n  " if wrong else " ", flush=True)
        if "--record" in sys.argv:
            record(name, counts)
    print("all:", dict(total))
    sys.exit(failed)


if __name__ == "__main__":
    main()
