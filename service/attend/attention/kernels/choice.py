"""Which kernel computes the calls of a layer, told from its spec alone: for `attend families`, and tests of what families get."""

from collections.abc import Collection

from attend.attention.decoding import row_steps
from attend.attention.kernels.fusion import Kernel, fuse
from attend.attention.kernels.pages import PagesKernel, suits_cache
from attend.attention.kernels.sdpa import DTYPES, CausalSdpaKernel, SdpaKernel
from attend.attention.program import constants, needed, program_of
from attend.spec import LayerSpec

STEPS = "steps"  # no kernel: the program is run step by step
CALLS = {"whole": "", "causal": "causal", "masked": "sets", "session": "intervals"}  # what a call asks for, and a step of a session


def kernels_of(spec: LayerSpec) -> dict[str, str]:
    """Kind of call, of CALLS -> the kernel that computes its output on a CPU, where the C extension is installed; STEPS if none does."""
    return {kind: _kernel_of(spec, kind, feature) for kind, feature in CALLS.items()}


def _kernel_of(spec: LayerSpec, kind: str, feature: str) -> str:
    own = spec.features
    features = own - {"intervals"} | {feature} if feature and not (feature == "causal" and "intervals" in own) else own
    kernels: Collection[Kernel] = (CausalSdpaKernel(spec), SdpaKernel(spec)) if spec.dtype in DTYPES else ()
    given = {name for step in constants(spec.program) for name in step.writes}
    program, wanted = program_of(spec, features), {"output"}
    if kind == "session":
        rows = {name for step in row_steps(needed(program, wanted, given)) for name in step.writes}
        pages = PagesKernel(spec) if suits_cache(spec) and spec.dtype == "float32" else None
        if pages is not None and fuse(needed(program, wanted, given | rows | {"key_projection", "value_projection"}), pages, wanted):
            return pages.name
    return next((kernel.name for kernel in kernels if fuse(needed(program, wanted, given), kernel, wanted)), STEPS)
