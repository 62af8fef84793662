"""Which kernels a layer has, and which of them computes its calls, told from its spec alone."""

from attend.attention.dataflow import constants, needed, row_steps
from attend.attention.kernels.fusion import Kernel, fuse
from attend.attention.kernels.pages import PagesKernel
from attend.attention.kernels.sdpa import CausalSdpaKernel, SdpaKernel
from attend.attention.program import program_of
from attend.spec import LayerSpec

STEPS = "steps"  # no kernel: the program is run step by step
CALLS = {"whole": "", "causal": "causal", "masked": "sets", "session": "intervals"}  # what a call asks for, and a step of a session


def kernels_of(spec: LayerSpec) -> dict[str, str]:
    """Call, of CALLS -> the kernel that computes its output on a CPU, where the C extension is installed; STEPS if none does."""
    return {call: _kernel_of(spec, call, feature) for call, feature in CALLS.items()}


def fused_kernels(spec: LayerSpec) -> tuple[Kernel, ...]:
    """The kernels that a layer tries for calls without a cache, in this order."""
    return CausalSdpaKernel(spec), SdpaKernel(spec)


def _kernel_of(spec: LayerSpec, call: str, feature: str) -> str:
    """The kernel of a call with this feature; a layer whose masks are intervals has no call that is only causal."""
    features = spec.features
    if feature and not (feature == "causal" and "intervals" in features):
        features = features - {"intervals"} | {feature}
    known = {name for step in constants(spec.program) for name in step.writes}
    program, wanted = program_of(spec, features), {"output"}
    if call == "session":
        rows = {name for step in row_steps(needed(program, wanted, known)) for name in step.writes}
        read = needed(program, wanted, known | rows | {"key_projection", "value_projection"})
        if PagesKernel.suits(spec) and fuse(read, PagesKernel(spec), wanted):
            return PagesKernel.name
    return next((kernel.name for kernel in fused_kernels(spec) if fuse(needed(program, wanted, known), kernel, wanted)), STEPS)
