"""Records by hooks what attention modules of transformers compute inside their model: inputs, weights and output. Needs torch.

`AttentionModules` says where a layer's modules are; `write_cases` fills a model, saves it, runs it, and writes a case file of what was
recorded of each layer.
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
class AttentionModules:
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


class Recorder:
    """Hooks on the modules of one layer, and the arrays that passed through them."""

    def __init__(self, model, modules):
        module = model.get_submodule(modules.module)
        query, key, output = (module.get_submodule(path) for path in (modules.query, modules.key, modules.output))
        self.modules, self.arrays = modules, {}
        self.hooks = [
            query.register_forward_pre_hook(lambda _, args: self._record("query", args[0])),
            key.register_forward_pre_hook(lambda _, args: self._record("key", args[0])),
            output.register_forward_hook(lambda _, args, result: self._record("output", result)),
            module.register_forward_hook(lambda _, args, result: self._record("weights", self._weights_in(result))),
        ]

    def _record(self, name, tensor):
        self.arrays[name] = tensor.detach().numpy()

    @staticmethod
    def _weights_in(result):
        """Of what a module returns the last [b, h, q, k]: T5 returns its position bias before the weights."""
        return [x for x in result if torch.is_tensor(x) and x.dim() == 4][-1]

    def case(self, situation, arguments):
        modules, arrays = self.modules, self.arrays
        mask = arguments.get(modules.mask)
        request = {
            "query": arrays["query"],
            "key": None if np.array_equal(arrays["query"], arrays["key"]) else arrays["key"],
            "attend_keys": None if mask is None else mask.tolist(),
            "fully_masked": "uniform",  # as the eager modules, which add the dtype's lowest number
            **modules.request,
        }
        load = {"layout": modules.layout, "prefix": modules.prefix, "spec": modules.spec}
        return case(f"{modules.prefix or modules.module}, {situation}", load, request, arrays["output"], arrays["weights"])


def write_cases(name, about, model, layers, situations, weights=None):
    """Writes one file. `layers`: AttentionModules; `situations`: about -> arguments of the model; `weights`: gives the checkpoint."""
    fill(model)
    model.eval().set_attn_implementation("eager")
    cases = []
    for situation, arguments in situations.items():
        recorders = [Recorder(model, modules) for modules in layers]
        with torch.no_grad():
            model(**arguments, output_attentions=True, return_dict=True)
        cases += [one.case(situation, arguments) for one in recorders]
        for hook in [hook for one in recorders for hook in one.hooks]:
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
