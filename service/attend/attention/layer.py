"""Multi-head attention, batch first: runs the program of a layer (`program.py`) for calls, on one device.

Kernels fuse some steps of the program (`kernels/`): short calls in C, projections included; torch's fused kernels; steps of a cache in C.
`nn.MultiheadAttention` is not used: some of its code paths ignore masks, and its results for fully masked rows depend on flags.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from attend.attention.call import FROM_HEADS, TOP_K, Call, Result, WeightBlock, reduce_weights
from attend.attention.dataflow import constants, needed
from attend.attention.dropout import Dropout
from attend.attention.executor import Assembly, Plan, Selection, Values, axes_of, plan_of, run_blocks, run_steps
from attend.attention.kernels.choice import fused_kernels
from attend.attention.kernels.fusion import Inexact, Kernel, fuse
from attend.attention.kernels.pages import PagesKernel
from attend.attention.kernels.sdpa import SdpaKernel
from attend.attention.kernels.short import ShortKernel
from attend.attention.masks import Masks
from attend.attention.numerics import torch_dtype
from attend.attention.operators.step import as_output
from attend.attention.program import WEIGHTED_VALUES, Program, program_of
from attend.attention.rows import row_slices
from attend.attention.torch_arithmetic import TorchArithmetic
from attend.axes import GRADIENTS, PROGRAM_TENSORS
from attend.spec import LayerSpec

LEAST_ROWS = 64  # of a block of a kernel that need not compute all keys for them
MOST_PLANS = 256  # of a layer: features and outputs of calls recur


class MultiHeadAttention:
    """One layer on one device. Immutable; calls may run in any thread, but only one at a time."""

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self.spec, self.device, self.dtype = spec, device, torch_dtype(spec.dtype)
        self.weights = dict(weights)  # by canonical name
        self.arithmetic = TorchArithmetic(self.weights, self.dtype, device)
        self.constants: Values = dict(self.weights)
        run_steps(self.arithmetic, constants(spec.program), self.constants)
        self._axes = {name: axes for operator in spec.operators for name, axes in operator.axes.items()}
        self._empties = any(step.empties for step in spec.program)
        self.short = ShortKernel.make(spec, self.weights, device)  # of whole calls
        self.kernels = fused_kernels(spec)
        pages = PagesKernel.make(spec, device)
        self.cache_kernels: tuple[Kernel, ...] = (pages,) if pages else ()
        self._plans: dict[tuple[object, ...], Plan | None] = {}

    def forward(self, call: Call) -> Result:
        """Compute the call's outputs, in the layer's dtype; scores and weights of half-precision layers are float32."""
        short = self.short
        if short and short.computes(call) and short.is_short(call) and (result := short.compute(call)) is not None:
            return result
        with torch.inference_mode():
            if "output_gradient" not in call.optional_inputs:
                return self.attend(call)
            result = self.attend(call, exact=True)
            return replace(result, tensors=result.tensors | self._gradients(call))

    def attend(self, call: Call, *, exact: bool = False) -> Result:
        """The outputs of a call but gradients.

        `exact`: without kernels, whose numbers may depend on the batch, and which have no derivatives.
        """
        exact = exact or call.options.reproducible
        fully_masked = self.fully_masked(call)
        wanted, tensors = call.options.outputs - {*GRADIENTS}, dict[str, Tensor]()
        if self._empties:  # which rows are fully masked is a value of the program
            wanted |= {"fully_masked"}
        if call.options.selects and "attention_weights" in wanted:  # of these heads and queries alone, everything else of all
            tensors = self._compute(call, {"attention_weights"}, fully_masked, exact=exact)
            wanted -= {"attention_weights"}
        if wanted:
            call = call.with_options(heads=None, queries=None) if call.options.selects else call
            if (
                wanted <= FROM_HEADS
                and not exact
                and fully_masked is None
                and self.device.type == "cpu"
                and not self.spec.reads_hidden_keys
            ):
                call = call.without_padding()
            tensors |= self._compute(call, wanted, fully_masked, exact=exact)
        if self._empties:
            empty = tensors["fully_masked"] if "fully_masked" in call.options.outputs else tensors.pop("fully_masked")
            fully_masked = empty if empty.any() else None
        return Result(tensors, fully_masked)

    def _compute(self, call: Call, wanted: Collection[str], fully_masked: Tensor | None, *, exact: bool) -> dict[str, Tensor]:
        """These outputs; `keys` and `values` in place of the attention weights if the call has `top_k`."""
        features = self.features_of(call)
        features = features if fully_masked is not None or self._empties else features - {"uniform"}
        known = frozenset(call.cached or ())
        for kernel in (*(() if exact else self.kernels), None):
            if (plan := self.plan(features, wanted, known, kernel)) is None:
                continue
            try:
                return self.run(plan, call, self.values_of(call, fully_masked, plan.reads))
            except Inexact:
                continue
        raise AssertionError("the plan without kernels computes everything")

    def features_of(self, call: Call) -> frozenset[str]:
        """The features of the program of a call."""
        return call.features | self.spec.implied_features(call.options.num_keys)

    def plan(
        self, features: Collection[str], wanted: Collection[str], known: Collection[str] = (), kernel: Kernel | None = None
    ) -> Plan | None:
        """The plan of calls with these features that has the known values; None if the kernel does not compute them."""
        key = frozenset(features), frozenset(wanted), frozenset(known), kernel and kernel.name
        if key not in self._plans:
            program = program_of(self.spec, features)
            steps: Program | None = needed(program, wanted, {*known, *self.constants})
            steps = steps if kernel is None or steps is None else fuse(steps, kernel, wanted)
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[key] = None if steps is None else plan_of(steps, wanted, axes_of(program, self._axes))
        return self._plans[key]

    def values_of(self, call: Call, fully_masked: Tensor | None, reads: Collection[str] | None = None) -> Values:
        """What a program gets: the constants of the layer, and the inputs of the call; with `reads`, of positions only those among them."""
        options, masks = call.options, call.masks
        positions: Values = {}
        if reads is None or "positions" in reads:
            positions["positions"] = masks.positions
        if reads is None or "keys" in reads:
            positions["keys"] = torch.arange(masks.num_keys, device=call.query.device)
        if reads is None or "query_coordinates" in reads or "key_coordinates" in reads:
            positions["query_coordinates"], positions["key_coordinates"] = call.coordinates
        return {
            **self.constants,
            "query": call.query,
            "key": call.key,
            "value": call.value,
            **positions,
            "masks": masks,
            "fully_masked": fully_masked,
            "bias": masks.bias,
            "scale": options.scale,
            "softcap": options.softcap,
            **{field.value: call.optional_inputs.get(name) for name, field in PROGRAM_TENSORS.items()},
            "kept_share": None if options.dropout is None else 1 - options.dropout[0],
            **(call.cached or {}),
        }

    def run(self, plan: Plan, call: Call, values: Values, keys_of: Callable[[slice], slice] | None = None) -> dict[str, Tensor]:
        """The wanted values of a plan; `keys_of`: the keys that some rows need."""
        top_k: dict[str, Tensor] = {}
        run_steps(self.arithmetic, plan.before, values, plan.wanted)
        if plan.block:
            num_queries = len(call.options.queries or range(call.options.num_queries))
            assembly = Assembly(num_queries)
            for rows, block in self._blocks(plan, call, values, keys_of=keys_of):
                for name in plan.results:
                    if name == "attention_weights" and name in plan.wanted:
                        for output, tensor in reduce_weights(_of_selected_heads(block[name], plan, call), call).items():
                            assembly.put(output, -2, rows, tensor)
                    else:
                        assembly.put(name, plan.axes[name].index("q"), rows, block[name])
            top_k = {name: assembly.tensors.pop(name) for name in TOP_K & {*assembly.tensors}}
            values |= assembly.tensors
        run_steps(self.arithmetic, plan.after, values, plan.wanted)
        options = call.options
        lengths = {"b": options.items, "h": self.spec.num_heads, "q": options.num_queries, "k": options.num_keys}
        outputs = {name: as_output(torch, values[name], plan.axes[name], lengths) for name in plan.wanted - {"attention_weights"}}
        if "attention_weights" in plan.wanted and not top_k:
            outputs["attention_weights"] = values["attention_weights"]
        return top_k | outputs

    def _blocks(
        self,
        plan: Plan,
        call: Call,
        values: Values,
        blocks: Iterable[slice] | None = None,
        keys_of: Callable[[slice], slice] | None = None,
    ) -> Iterator[tuple[slice, Values]]:
        """The values of each block of the call's rows, of its selected heads and queries alone; `blocks` are the rows of each block."""
        options, spec = call.options, self.spec
        if options.dropout is not None:
            values["kept"] = Dropout(options, spec.num_heads, call.query.device, all_heads=plan.all_heads)
        if options.selects:
            selection = Selection(None if plan.all_heads else options.heads, options.queries)
            values |= {name: selection.of(values[name], plan.axes.get(name, ()), spec.num_heads) for name in plan.inputs if name in values}
        num_queries = options.num_queries if options.queries is None else len(options.queries)
        heads = spec.num_heads if options.heads is None or plan.all_heads else len(options.heads)
        most_rows = num_queries
        if keys_of is None:
            fused = any(step.name == SdpaKernel.name for step in plan.block) and self.device.type == "cpu"  # others would wait
            if fused and values["masks"].has_intervals and not any("k" in plan.axes.get(name, ()) for name in plan.results):
                keys_of, most_rows = self._keys_of(values["masks"]), max(LEAST_ROWS, num_queries // 8)  # fewer rows need fewer keys
        slices = row_slices(options.items * heads * options.num_keys, num_queries, self.device, most_rows) if blocks is None else blocks
        return run_blocks(self.arithmetic, plan, values, slices, keys_of or (lambda rows: slice(0, options.num_keys)))

    @staticmethod
    def _keys_of(masks: Masks) -> Callable[[slice], slice]:
        """The shortest range with all keys that lengths, causality, windows and chunks leave to some rows; at least one key."""

        def keys(rows: slice) -> slice:
            first, last = masks.interval(rows)
            start = min(max(int(first.min()), 0), masks.num_keys - 1)
            return slice(start, max(int(last.max()) + 1, start + 1))

        return keys

    def _gradients(self, call: Call) -> dict[str, Tensor]:
        """The requested gradients of <output_gradient, output> by query, key and value as three separate inputs, with torch's autograd.

        The output does not depend on inputs whose weights or heads' outputs are all replaced; their gradients are zeros.
        """
        with torch.inference_mode(False), torch.enable_grad():
            inputs = [x.clone().requires_grad_() for x in (call.query, call.key, call.value)]
            query, key, value = inputs
            separate = replace(call, query=query, key=key, value=value).with_options(
                outputs=frozenset({"output"}), self_attention=False, keys_as_values=False
            )
            output = self.attend(separate, exact=True).tensors["output"]
            if output.requires_grad:
                output_gradient = call.optional_inputs["output_gradient"].to(output.dtype)
                gradients = torch.autograd.grad(output, inputs, output_gradient, materialize_grads=True)
            else:
                gradients = tuple(map(torch.zeros_like, inputs))
        named = zip(GRADIENTS, gradients, strict=True)
        return {name: x for name, x in named if name in call.options.outputs}

    def fully_masked(self, call: Call) -> Tensor | None:
        """bool [b, h, q]: the rows without a key to attend to; None if there are none."""
        options, heads = call.options, self.spec.num_heads
        rows = call.masks.fully_masked(row_slices(options.items * heads * options.num_keys, options.num_queries, self.device))
        return None if rows is None or not rows.any() else rows.expand(options.items, heads, options.num_queries)

    def project(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """The heads of the call: query [b, h, q, head_dim], key and value [b, kv heads, k, …], after norms and RoPE."""
        names = ("query_projection", "key_projection", "value_projection")
        tensors = self._compute(call, names, None, exact=True)
        query, key, value = (tensors[name] for name in names)
        return query, key, value

    def finish(self, call: Call, head_outputs: Tensor) -> dict[str, Tensor]:
        """The outputs of the call that follow from weighted values [b, h, q, value_head_dim]: `head_outputs`, `concatenated`, `output`."""
        program = program_of(self.spec, self.features_of(call))
        start = program.index(WEIGHTED_VALUES) + 1
        wanted = {*FROM_HEADS & call.options.outputs}
        first = [step for step in needed(program, wanted, {*self.constants}) if step in program[start:]]
        values = self.values_of(call, None) | {"head_outputs": head_outputs}
        run_steps(self.arithmetic, first, values)
        return {name: values[name] for name in wanted}

    def with_sinks(self, total: Tensor) -> Tensor:
        """Log-sum-exps [b, h, q] of scores with those of the layer's sinks; unchanged if it has none."""
        values = self.constants | {"log_sum_exp": total}
        run_steps(self.arithmetic, [step for step in self.spec.program if step.name == "sum_with_sinks"], values)
        return torch.as_tensor(values["log_sum_exp"])

    def project_back(self, concatenated: Tensor) -> Tensor:
        """The output projection: [b, q, h * value_head_dim] -> [b, q, output_dim]; unchanged if the layer has no projections."""
        return self.arithmetic.project(concatenated, "output") if self.spec.projections else concatenated

    def weight_blocks(
        self,
        call: Call,
        projected: Mapping[str, Tensor] = {},
        fully_masked: Tensor | None = None,
        blocks: Iterable[slice] | None = None,
    ) -> Iterator[WeightBlock]:
        """Yield the weights of the selected heads and queries after dropout, block by block, and the keys that each row may attend to.

        `projected`: heads that are known, by the names of outputs; they may be of another number of heads. `blocks`: the rows of each
        block. A caller that drops each block before the next needs memory for one block only.
        """
        known = {*projected, *(call.cached or ())}
        features = self.features_of(call)
        plan = self.plan(features, ("attention_weights", "visible"), known)
        assert plan is not None
        values = self.values_of(call, fully_masked, plan.reads) | dict(projected)
        run_steps(self.arithmetic, plan.before, values)
        restricted = bool(features & {"causal", "intervals", "sets"}) or any(step.name == "select" for step in plan.block)
        for rows, block in self._blocks(plan, call, values, blocks):
            weights, visible = (_of_selected_heads(block[name], plan, call) for name in ("attention_weights", "visible"))
            yield WeightBlock(rows, weights, visible if restricted else None)


def _of_selected_heads(x: Tensor, plan: Plan, call: Call) -> Tensor:
    """The heads of x [b, h|1, q, k] that the call selects, if the steps of the plan needed all."""
    heads = call.options.heads if plan.all_heads else None
    return x if heads is None or x.shape[1] == 1 else x[:, list(heads)]
