"""What attention modules of transformers compute inside their model, by hooks: what goes in, the weights, what comes out. Needs torch.

A `Look` says where a layer's modules are; `keep` fills a model, saves it, runs it, and writes a case file of what each look saw.
"""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers
from casefile import case, draw_all, save
from safetensors.numpy import load_file

transformers.utils.logging.disable_progress_bar()
VERSIONS = {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}


@dataclass
class Look:
    """One layer: the path of its attention module; below that path, what makes queries, what makes keys, and the output projection."""

    module: str
    query: str
    key: str
    output: str
    prefix: str  # of the layer in the checkpoint
    spec: dict
    request: dict = field(default_factory=dict)  # causal, …
    mask: str = "attention_mask"  # the model's argument that says which keys are real
    layout: "str | None" = None


class Seen:
    """Hooks on one attention module, and what went by."""

    def __init__(self, model, look):
        module = model.get_submodule(look.module)
        query, key, output = (module.get_submodule(path) for path in (look.query, look.key, look.output))
        self.look, self.arrays = look, {}
        self.hooks = [
            query.register_forward_pre_hook(lambda _, args: self._keep("query", args[0])),
            key.register_forward_pre_hook(lambda _, args: self._keep("key", args[0])),
            output.register_forward_hook(lambda _, args, result: self._keep("output", result)),
            module.register_forward_hook(lambda _, args, result: self._keep("weights", self._weights_in(result))),
        ]

    def _keep(self, name, tensor):
        self.arrays[name] = tensor.detach().numpy()

    @staticmethod
    def _weights_in(result):
        """Of what a module returns the last [b, h, q, k]: T5 returns its position bias before the weights."""
        return [x for x in result if torch.is_tensor(x) and x.dim() == 4][-1]

    def case(self, situation, arguments):
        mask, arrays, look = arguments.get(self.look.mask), self.arrays, self.look
        request = {
            "query": arrays["query"],
            "key": None if np.array_equal(arrays["query"], arrays["key"]) else arrays["key"],
            "attend_keys": None if mask is None else mask.tolist(),
            "fully_masked": "uniform",  # what the eager modules do: they add the dtype's lowest number
            **look.request,
        }
        load = {"layout": look.layout, "prefix": look.prefix, "spec": look.spec}
        return case(f"{look.prefix or look.module}, {situation}", load, request, arrays["output"], arrays["weights"])


def keep(name, about, model, looks, situations, weights=None):
    """Writes one file. `situations`: about -> arguments of the model; `weights`: the checkpoint, as saved if left out."""
    fill(model)
    model.eval().set_attn_implementation("eager")
    cases = []
    for situation, arguments in situations.items():
        seen = [Seen(model, look) for look in looks]
        with torch.no_grad():
            model(**arguments, output_attentions=True, return_dict=True)
        cases += [one.case(situation, arguments) for one in seen]
        for hook in [hook for one in seen for hook in one.hooks]:
            hook.remove()
    save(f"transformers_{name}", about, VERSIONS, (weights or saved)(model), cases)


def fill(model):
    """Every parameter from NumPy's frozen stream: the zeros and ones of a fresh model would hide mistakes."""
    drawn = draw_all(7, {name: tuple(parameter.shape) for name, parameter in model.named_parameters()})
    for name, parameter in model.named_parameters():
        parameter.data = torch.from_numpy(drawn[name])


def saved(model):
    """The checkpoint as save_pretrained writes it: what is on hubs."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        (path,) = Path(folder).glob("*.safetensors")
        return load_file(path)


def in_memory(model):
    """The names that the modules themselves have; where they differ from the files', people save these too."""
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}
