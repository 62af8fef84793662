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
    """Kind of call, of CALLS -> the kernel that computes its output on a CPU, where the C extension is installed; STEPS if none does."""
    return {kind: _kernel_of(spec, kind, feature) for kind, feature in CALLS.items()}


def fused_kernels(spec: LayerSpec) -> tuple[Kernel, ...]:
    """The kernels that a layer tries for calls without a cache, in this order."""
    return CausalSdpaKernel(spec), SdpaKernel(spec)


def _kernel_of(spec: LayerSpec, kind: str, feature: str) -> str:
    own = spec.features
    features = own - {"intervals"} | {feature} if feature and not (feature == "causal" and "intervals" in own) else own
    given = {name for step in constants(spec.program) for name in step.writes}
    program, wanted = program_of(spec, features), {"output"}
    if kind == "session":
        rows = {name for step in row_steps(needed(program, wanted, given)) for name in step.writes}
        read = needed(program, wanted, given | rows | {"key_projection", "value_projection"})
        if PagesKernel.suits(spec) and fuse(read, PagesKernel(spec), wanted):
            return PagesKernel.name
    return next((kernel.name for kernel in fused_kernels(spec) if fuse(needed(program, wanted, given), kernel, wanted)), STEPS)
