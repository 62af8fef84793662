"""Changes each field of the configs of tiny models: a change of transformers' eager attention must change ours equally, or be refused.

Run as `python perturb_models.py [--record] [NAME …]` where `generate_models.py` runs, for all models or those named. It prints every change
after which a layer is wrong, and for each model how many changes led to what: right, refused, or not built, by transformers itself or since
the model would be large. With `--record` it keeps that in `perturbed.txt`, which the page of families counts.
"""

import copy
import json
import re
import signal
import sys
from collections import Counter, defaultdict
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from generate_models import FOLDER, compare, layers_of
from tiny_models import TinyModel
from transformers import CONFIG_MAPPING, AutoModel

from attend.checkpoints.config import Config
from attend.checkpoints.model import describe
from attend.errors import InvalidRequest

LARGE_EPS = 0.1
MOST_PARAMETERS, MOST_TOGETHER, SECONDS = 10_000_000, 1_000_000, 60  # of a model with one change, and with several
RECORD = Path(__file__).parent / "perturbed.txt"

REMOVED, LEFT_OUT = object(), object()
KEPT = re.compile(  # what the model is, and settings of training, generation and output
    r"^(model_type|(torch_)?dtype|architectures|vocab_size|num_hidden_layers|n_layers?|problem_type|return_dict|use_cache|output_\w+)$|"
    r"dropout|pdrop|token_id|initializer|id2label|label2id|chunk_size_feed_forward|is_(encoder_)?decoder|tie_word|router_\w+_coef"
)
OF_INPUTS = re.compile(r"^(image_size|patch_size|stride|num_frames|tubelet_size|max_length|num_mel_bins|\w+_stride)$")  # large by default


def alternatives(name, value):
    """Other values of a field, among them its absence."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value * 2 or 1
    elif isinstance(value, float):
        yield value * 2 or 0.5
        if value < LARGE_EPS:  # twice a small eps changes nothing that is seen
            yield LARGE_EPS
    elif value is LEFT_OUT:
        yield 3
        yield True
    elif value is None:
        yield 3
        yield 3.0  # which strict dataclasses want of numbers that are not counts
        yield True
    elif isinstance(value, list):
        yield value[::-1]
    if value is not LEFT_OUT and not OF_INPUTS.search(name):
        yield REMOVED


def places(fields, read, *above):
    """(path, value) of each field, also inside of others, and of each that the loader reads though the config leaves it out."""
    left_out = {name: LEFT_OUT for name in sorted(read.get("/".join(("/config", *above)), ())) if name not in fields}
    for name, value in (fields | left_out).items():
        if not KEPT.search(name):
            yield (*above, name), value
            if isinstance(value, dict):
                yield from places(value, read, *above, name)


def fields_read(config):
    """Place of each section of the config -> the names of fields in it that the loader looks for."""
    read, get = defaultdict(set), Config.get

    def watched(self, *names, default=None):
        read[self.at].update(names)
        return get(self, *names, default=default)

    with patch.object(Config, "get", watched):
        description(config)
    return read


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


def is_saved_as_it_is(config):
    """Whether the model's file has the tensors of the model, so that changed models need not be saved."""
    model, file = TinyModel(config, in_memory=True), TinyModel(config)
    return all(name in model.tensors and np.array_equal(x, model.tensors[name]) for name, x in file.tensors.items())


def parameters(config):
    """The number of parameters, 0 if there is no such model; the defaults of sizes that are removed can make a large one."""
    try:
        with torch.device("meta"):
            model = AutoModel.from_config(CONFIG_MAPPING[config["model_type"]].from_dict(config))
    except Exception:
        return 0
    return sum(parameter.numel() for parameter in model.parameters())


def description(config):
    """What the config alone says of every layer; None for those that it refuses."""
    found = []
    for layer in layers_of(config):
        try:
            described = describe(config, *layer)
            found.append((layer, described.fields, described.conversion))
        except InvalidRequest:
            found.append(None)
    return found


def verdict(config, in_memory):
    """wrong if any layer is, right if some are and none is wrong, else refused or not built."""
    signal.alarm(SECONDS)
    try:
        if not any(description(config)):
            return "refused"
        found = {kind for kind, _ in compare(config, in_memory).values()}
    except InvalidRequest:
        return "refused"
    except Exception:  # transformers has no such model, or it takes too long
        return "not built"
    finally:
        signal.alarm(0)
    return next((kind for kind in ("wrong", "right", "refused") if kind in found), "not built")


class Perturbation:
    """The changes of one model's config, and what became of each."""

    def __init__(self, name):
        self.config = json.loads((FOLDER / f"{name}.json").read_text())["config"]
        self.in_memory, self.own = is_saved_as_it_is(self.config), description(self.config)
        self.counts, self.wrong = Counter(), []
        together = {}
        for path, value in places(self.config, fields_read(self.config)):
            for i, other in enumerate(alternatives(path[-1], value)):
                key = (i, len(path), other is REMOVED) if self.changes_nothing_of_ours(path, other) else (path, i)
                together.setdefault(key, []).append((path, other))
        for changes in together.values():
            self.try_all(changes)

    def changes_nothing_of_ours(self, path, value):
        """Whether layers are described as before, so that such changes may be tried together."""
        try:
            return description(changed(self.config, path, value)) == self.own
        except Exception:
            return False

    def try_all(self, changes):
        """Tries changes at once; unless that is right, each half of them by itself."""
        config = self.config
        for path, value in changes:
            config = changed(config, path, value)
        most = MOST_PARAMETERS if len(changes) == 1 else MOST_TOGETHER
        kind = verdict(config, self.in_memory) if parameters(config) <= most else "not built"
        if kind == "right" or len(changes) == 1:
            self.counts[kind] += len(changes)
            if kind == "wrong":
                ((path, value),) = changes
                self.wrong.append(f"{'/'.join(path)}: {'removed' if value is REMOVED else value}")
            return
        middle = len(changes) // 2
        self.try_all(changes[:middle])
        self.try_all(changes[middle:])


def record(name, counts):
    """Replaces the line of this model in the record; drops those of removed models."""
    lines = dict(line.split(": ") for line in RECORD.read_text().splitlines()) if RECORD.exists() else {}
    lines[name] = ", ".join(f"{kind} {counts[kind]}" for kind in ("right", "refused", "not built", "wrong") if counts[kind])
    kept = sorted(lines.keys() & {path.stem for path in FOLDER.glob("*.json")})
    RECORD.write_text("".join(f"{name}: {lines[name]}\n" for name in kept))


def stop(*_):
    raise TimeoutError(f"{SECONDS} s")


def main():
    signal.signal(signal.SIGALRM, stop)
    chosen = [name for name in sys.argv[1:] if not name.startswith("-")]
    total, failed = Counter(), False
    for name in chosen or sorted(path.stem for path in FOLDER.glob("*.json")):
        tried = Perturbation(name)
        total, failed = total + tried.counts, failed or bool(tried.wrong)
        print(name, dict(tried.counts), *tried.wrong, sep="\n  " if tried.wrong else " ", flush=True)
        if "--record" in sys.argv:
            record(name, tried.counts)
    print("all:", dict(total))
    sys.exit(failed)


if __name__ == "__main__":
    main()
