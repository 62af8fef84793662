"""What a kernel computes, declared by names: of a spec's fields, of options of a call, of outputs, datatypes and devices.

A kernel is used for what it declares and for nothing else. So a new field or option that no declaration names is never ignored: it sends
the calls that have it to eager attention, which declares all of them.
"""

from typing import NamedTuple

import torch

from attend.attention.call import Call
from attend.attention.operators import OPERATORS
from attend.attention.operators.stages import STAGES, stages_of
from attend.axes import CALL_TENSORS
from attend.spec import LayerSpec

# Fields that no kernel has to compute: shapes, weights, and what calls state for themselves. Kernels check the shapes that they need.
# fmt: off
EXTERNAL_FIELDS = frozenset({
    "d_model", "num_heads", "num_kv_heads", "head_dim", "value_head_dim", "key_dim", "value_dim",
    "output_dim", "bias", "projections", "seed", "init", "gain", "dtype", "matmul_precision", "scale",
}) | {operator.field for operator in OPERATORS if operator.of_calls}
# fmt: on


def _fields_computed(*by: str) -> frozenset[str]:
    """Fields all of whose operators have stages that these compute, and no other."""
    unfit = {operator.field for operator in OPERATORS if any(STAGES[stage].by not in by for stage in stages_of(operator))}
    return frozenset(operator.field for operator in OPERATORS) - unfit - EXTERNAL_FIELDS


OUTER_FIELDS = _fields_computed("layer")  # those that the call's masks have among them
BIAS_FIELDS = _fields_computed("layer", "bias") - OUTER_FIELDS  # `Eager.bias` and `Eager.shift` compute them
# Tensors of a call that kernels have to compute. Those that need such a tensor say what it means.
KERNEL_TENSORS = tuple(name for name, field in CALL_TENSORS.items() if not field.outer and field.needs not in CALL_TENSORS)


class Declaration(NamedTuple):
    """What a kernel computes: layers that set at most these `fields`, in these dtypes; calls with at most these `options`.

    None is all that there are, and will be.
    """

    fields: frozenset[str] | None
    options: frozenset[str] | None  # of `options_of`
    outputs: frozenset[str]
    dtypes: frozenset[str] | None = None
    devices: frozenset[str] | None = None  # types of devices

    def has_layer(self, spec: LayerSpec, device: torch.device) -> bool:
        """Whether the kernel computes calls to such a layer."""
        is_here = (self.devices is None or device.type in self.devices) and (self.dtypes is None or spec.dtype in self.dtypes)
        return is_here and (self.fields is None or fields_of(spec) <= self.fields)

    def has_call(self, call: Call, outputs: frozenset[str]) -> bool:
        """Whether the kernel computes these outputs of such a call."""
        return outputs <= self.outputs and (self.options is None or options_of(call) <= self.options)


def fields_of(spec: LayerSpec) -> frozenset[str]:
    """The fields that kernels have to compute and that are not at their defaults."""
    fields = type(spec).model_fields.items()
    return frozenset(name for name, field in fields if name not in EXTERNAL_FIELDS and getattr(spec, name) != field.default)


def options_of(call: Call) -> frozenset[str]:
    """What the call asks of a kernel beyond softmax(scale · Q Kᵀ) V.

    `intervals` and `sets` are its two kinds of masks; `uniform_rows` are rows without keys that get equal weights. The layer applies
    `head_scale` to the head outputs of a kernel that declares it, and replaces them by `head_outputs`.
    """
    masks = call.masks
    present = {
        "softcap": call.options.softcap,
        "dropout": call.options.dropout is not None,
        "reproducible": call.options.reproducible,
        "gradients": call.output_gradient is not None,
        "bias": masks.bias is not None,
        "intervals": masks.has_intervals,
        "sets": masks.has_sets,
        "uniform_rows": call.options.fully_masked == "uniform" and masks.has_any,
    }
    for name in KERNEL_TENSORS:
        present[name] = getattr(call, name) is not None
    return frozenset([name for name, value in present.items() if value])
