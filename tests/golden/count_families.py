"""Which of transformers' families can be built tiny and run, which have softmax attention, and which this service computes or refuses.

A family is a model type whose config has no sections: the others combine families, such as one for text and one for images, or are other
names of a family.
Run as `python count_families.py [NAME …]` where `generate_models.py` runs: it writes `tiny_families.txt`, or the lines of these names, with
the reason of each refusal. `docs/list_checkpoints.py` makes its figures from it. A family is right if at least one kind
of its layers is, and none is wrong; the others of its layers are refused.
"""

import signal
import sys
from pathlib import Path

import torch
from generate_models import SIZES, compare, tiny_config
from tiny_models import forward
from transformers import CONFIG_MAPPING, AutoModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from attend.checkpoints.families import FAMILIES, REASONS, REFUSED

FILE = Path(__file__).parent / "tiny_families.txt"
MOST_PARAMETERS = 30_000_000
SECONDS = 60
KINDS = ("right", "refused", "wrong", "no softmax", "combined", "not built")


def verdict(model_type):
    """One of KINDS, and why. Families that are known to be refused count as refused even if they cannot be built."""
    default = CONFIG_MAPPING[model_type]().to_dict()
    has_sections = any(isinstance(x, dict) and "model_type" in x for x in default.values())
    if (has_sections and model_type not in FAMILIES) or default["model_type"] != model_type:
        return "combined", ""
    if model_type in REASONS["layers without a softmax"].split():
        return "no softmax", ""
    if model_type in REFUSED:
        return "refused", REFUSED[model_type]
    try:
        config = tiny_config(model_type, SIZES.get(model_type, {}))
        if model_type in FAMILIES:
            found = dict(compare(config).values())
            return next((kind for kind in ("wrong", "right") if kind in found), "not built"), ""
        settings = CONFIG_MAPPING[model_type].from_dict(config)
        with torch.device("meta"):
            parameters = sum(x.numel() for x in AutoModel.from_config(settings).parameters())
        if parameters > MOST_PARAMETERS:
            return "not built", f"{parameters} parameters"
        has_softmax = runs_softmax(AutoModel.from_config(settings, attn_implementation="eager").eval())
    except Exception as error:
        return "not built", repr(error)[:300]
    return ("refused", "without a row") if has_softmax else ("no softmax", "")


def runs_softmax(model):
    """Whether a forward pass has a softmax of scores, whose last two axes are queries and keys."""
    seen = []

    def watched(function):
        def softmax(x, *args, **named):
            seen.append(x.dim() > 2 and min(x.shape[-2:]) > 2)  # there are two experts
            return function(x, *args, **named)

        return softmax

    functions = [(torch.nn.functional, "softmax"), (torch, "softmax"), (torch.Tensor, "softmax")]
    plain = [getattr(*function) for function in functions]
    try:
        for (owner, name), function in zip(functions, plain, strict=True):
            setattr(owner, name, watched(function))
        forward(model)
    finally:
        for (owner, name), function in zip(functions, plain, strict=True):
            setattr(owner, name, function)
    return any(seen)


def main():
    def stop(*_):
        raise TimeoutError(f"{SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    lines = {line.split(": ")[1]: line for line in FILE.read_text().splitlines()} if sys.argv[1:] else {}
    for model_type in sorted(MODEL_MAPPING_NAMES.keys() & set(sys.argv[1:] or MODEL_MAPPING_NAMES)):
        signal.alarm(SECONDS)
        try:
            kind, why = verdict(model_type)
        except TimeoutError as error:
            kind, why = "not built", str(error)
        signal.alarm(0)
        lines[model_type] = f"{kind}: {model_type}: {why}" if kind == "refused" else f"{kind}: {model_type}"
        print(f"{kind}: {model_type}", why, flush=True)
    FILE.write_text("\n".join(sorted(lines.values(), key=lambda line: (KINDS.index(line.partition(":")[0]), line))) + "\n")


if __name__ == "__main__":
    main()
