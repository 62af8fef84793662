"""Which of transformers' families can be built tiny and run, which of those have softmax attention, and what becomes of them here.

A family is a model type whose config has no sections: the others combine families, such as one for text and one for images.
Run as `python count_families.py` where `generate_models.py` runs: it writes `tiny_families.txt`, from which `docs/list_checkpoints.py`
makes its figures. A model type is right if at least one layer is, and no layer is wrong; the others of its layers are refused.
"""

import signal
import sys
from pathlib import Path

import torch
from generate_models import SIZES, compare, tiny_config
from tiny_models import forward
from transformers import CONFIG_MAPPING, AutoModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from service.errors import InvalidRequest

FILE = Path(__file__).parent / "tiny_families.txt"
MOST_PARAMETERS = 30_000_000
SECONDS = 60
KINDS = ("right", "refused", "wrong", "no softmax", "combined", "not built")


def verdict(model_type):
    """One of KINDS, and why."""
    try:
        if any(isinstance(x, dict) and "model_type" in x for x in CONFIG_MAPPING[model_type]().to_dict().values()):
            return "combined", ""
        config = tiny_config(model_type, SIZES.get(model_type, {}))
        settings = CONFIG_MAPPING[model_type].from_dict(config)
        with torch.device("meta"):
            parameters = sum(x.numel() for x in AutoModel.from_config(settings).parameters())
        if parameters > MOST_PARAMETERS:
            return "not built", f"{parameters} parameters"
        has_softmax = runs_softmax(AutoModel.from_config(settings, attn_implementation="eager").eval())
    except Exception as error:
        return "not built", repr(error)[:300]
    if not has_softmax:
        return "no softmax", ""
    try:
        found = dict(compare(config).values())
    except InvalidRequest as refusal:
        return "refused", str(refusal)
    except Exception as error:
        return "refused", repr(error)[:300]
    kind = next((kind for kind in ("wrong", "right") if kind in found), "refused")
    return kind, found.get("refused", "")


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
    lines = []
    for model_type in sys.argv[1:] or sorted(MODEL_MAPPING_NAMES):
        signal.alarm(SECONDS)
        try:
            kind, why = verdict(model_type)
        except TimeoutError as error:
            kind, why = "not built", str(error)
        signal.alarm(0)
        lines.append(f"{kind}: {model_type}")
        print(lines[-1], why, flush=True)
    if not sys.argv[1:]:
        FILE.write_text("\n".join(sorted(lines, key=lambda line: (KINDS.index(line.partition(":")[0]), line))) + "\n")


if __name__ == "__main__":
    main()
