"""The operation that computes metrics of a layer and a call in place of the forward pass.

Metrics of weights read one block of query rows at a time. If a metric needs head outputs, they come from the layer's forward pass, which
may compute them without weights.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attend.attention.call import Call, Result
from attend.attention.layer import MultiHeadAttention
from attend.attention.operations import Operation
from attend.attention.rows import row_slices
from attend.heads.metrics.contributions import (
    contribution_products,
    gradient_importance,
    mean_ablation,
    pruning_order,
    value_norms,
    zero_ablation,
)
from attend.heads.metrics.heads import (
    CosineSimilarity,
    JensenShannon,
    SingleHead,
    as_single_head,
    deviation,
    disagreement,
    head_products,
)
from attend.heads.metrics.rows import ROW_METRICS, MetricsBlock, MetricsOptions, StrongestLinks, make_metrics_block

PER_QUERY = "_per_query"
OF_WEIGHTS = {"strongest_links", "cosine_similarity", "jensen_shannon", "position_disagreement", "deviation_across_heads", "single_head"}
OF_WEIGHTS |= {"value_norm_weights", *ROW_METRICS, *(name + PER_QUERY for name in ROW_METRICS)}
OVERFLOWED = "overflowed"  # name of a bool tensor in the result: whether an input of the metrics is not finite
OF_CONTRIBUTIONS = ("contribution", "gradient_importance", "zero_ablation", "mean_ablation", "pruning_order")


@dataclass(frozen=True, slots=True)
class MetricsOperation(Operation):
    """The operation that computes metrics instead of outputs. It ignores the call's selection of weights."""

    options: MetricsOptions

    @torch.inference_mode()
    def run(self, layer: MultiHeadAttention, call: Call) -> Result:
        """The requested metrics: name, or `name.part`, -> tensor [b, …], float64, or int64 for indices. The call must have no dropout.

        The tensor `overflowed` is true if an input of the metrics is not finite, so that some numbers are missing or NaN.
        """
        computation = _MetricsComputation(layer, call.with_options(heads=None, queries=None), self.options)
        metrics = computation.value_metrics() | computation.weight_metrics() | computation.output_metrics()
        requested = {name: tensor for name, tensor in metrics.items() if name.partition(".")[0] in self.options.metrics}
        return Result({**requested, OVERFLOWED: torch.stack(computation.overflowed).any()}, computation.fully_masked)

    def to(self, device: torch.device) -> "MetricsOperation":
        return MetricsOperation(self.options.to(device))


class _MetricsComputation:
    """The metrics of one call. Each method computes those of one kind that are requested; `overflowed` has a flag of each input."""

    def __init__(self, layer: MultiHeadAttention, call: Call, options: MetricsOptions) -> None:
        self.layer, self.call, self.options = layer, call, options
        self.projected: tuple[Tensor, ...] = layer.project(call)  # query, key, value: [b, heads, n, d]
        self.fully_masked = layer.fully_masked(call)
        self.real = call.masks.real_keys(call.key.shape[0])
        self.overflowed = [torch.zeros((), dtype=torch.bool, device=call.query.device)]
        self.output_weight = layer.weights.get("output.weight")

    def value_metrics(self) -> dict[str, Tensor]:
        metrics: dict[str, Tensor] = {}
        value = self.projected[2]
        if self.options.includes("value_norms", "value_norm_weights", "subspace_disagreement"):
            self.overflowed.append((~torch.isfinite(value).all(-1) & self.real[:, None]).any())
        if self.options.includes("value_norms"):
            metrics["value_norms"] = self.value_norms
        if self.options.includes("subspace_disagreement"):
            metrics["subspace_disagreement"] = disagreement(head_products(value, self.real[:, None]))
        return metrics

    @cached_property
    def value_norms(self) -> Tensor:
        groups = self.layer.spec.num_heads // self.layer.spec.num_kv_heads
        norms = value_norms(self.projected[2], self.output_weight, groups, self.real)
        return norms * self.call.optional_inputs["head_scale"][..., 0].abs() if "head_scale" in self.call.optional_inputs else norms

    def weight_metrics(self) -> dict[str, Tensor]:
        """All metrics of weights, in one pass over the query rows."""
        options = self.options
        if not OF_WEIGHTS & set(options.metrics):
            return {}
        row_metrics = {name: function for name, function in ROW_METRICS.items() if options.includes(name, name + PER_QUERY)}
        accumulators: list[StrongestLinks | CosineSimilarity | JensenShannon] = []
        if options.includes("strongest_links"):
            accumulators.append(StrongestLinks(options.top_links, options.link_keys))
        if options.includes("cosine_similarity", "position_disagreement"):
            accumulators.append(CosineSimilarity())
        if options.includes("jensen_shannon"):
            accumulators.append(JensenShannon())
        norms = self.value_norms.nan_to_num(0)[:, :, None] if options.includes("value_norm_weights") else None
        parts: dict[str, list[Tensor]] = {}  # name -> a tensor of each block, with its rows along the axis -1, or -2 of [b, h, rows, k]
        for block in self._blocks(self.call, self.projected, self.fully_masked):
            self.overflowed.append(block.overflowed.any())
            for name, function in row_metrics.items():
                parts.setdefault(name + PER_QUERY, []).append(block.nan_where_uncounted(function(block)))
            for accumulator in accumulators:
                accumulator.add(block)
            if options.includes("deviation_across_heads"):
                parts.setdefault("deviation_across_heads", []).append(deviation(block))
            if norms is not None:
                scaled = (block.weights * norms.to(block.weights.dtype)).masked_fill(~block.counts[..., None], torch.nan)
                parts.setdefault("value_norm_weights", []).append(scaled)
        metrics = {name: torch.cat(tensors, -2 if tensors[0].ndim == 4 else -1) for name, tensors in parts.items()}
        metrics |= {name: metrics[name + PER_QUERY].nanmean(-1) for name in row_metrics}
        for accumulator in accumulators:
            metrics |= accumulator.tensors()
        return metrics | (self._single_head() if options.includes("single_head") else {})

    def _blocks(
        self, call: Call, projected: tuple[Tensor, ...], fully_masked: Tensor | None, slices: Iterable[slice] | None = None
    ) -> Iterator[MetricsBlock]:
        """The weights of a call block by block; `slices` are the rows of each block."""
        first_key = self.real.to(torch.int8).argmax(-1)  # the first that is not padding
        heads = {"query_projection": projected[0], "key_projection": projected[1]}
        for block in self.layer.weight_blocks(call, heads, fully_masked, slices):
            yield make_metrics_block(block, call.masks.positions, fully_masked, first_key, self.options)

    def _single_head(self) -> dict[str, Tensor]:
        """Compare the layer with a layer of one head, in blocks of the same rows."""
        single_call, *single = as_single_head(self.call, *self.projected)
        fully_masked = None if self.fully_masked is None else self.fully_masked.all(1, keepdim=True)
        accumulator = SingleHead()
        batch, heads, num_queries, _ = self.projected[0].shape
        slices = tuple(row_slices(batch * heads * self.call.masks.num_keys, num_queries))
        single_blocks = self._blocks(single_call, tuple(single), fully_masked, slices)
        blocks = self._blocks(self.call, self.projected, self.fully_masked, slices)
        for single_block, block in zip(single_blocks, blocks, strict=True):
            accumulator.add(single_block, block, single[2])
        output = self.layer.forward(self.call.with_options(outputs=frozenset({"output"}))).tensors["output"]
        single_output = self.layer.project_back(accumulator.outputs.to(self.layer.dtype))
        return accumulator.tensors(output, single_output, self._counts(fully_masked, 1)[:, 0])

    def output_metrics(self) -> dict[str, Tensor]:
        """All metrics of head outputs."""
        if not self.options.includes("output_disagreement", *OF_CONTRIBUTIONS):
            return {}
        heads = self.layer.forward(self.call.with_options(outputs=frozenset({"head_outputs"}))).tensors["head_outputs"]
        counts = self._counts(self.fully_masked, heads.shape[1])
        self.overflowed.append((~torch.isfinite(heads).all(-1) & counts).any())
        metrics: dict[str, Tensor] = {}
        if self.options.includes("output_disagreement"):
            metrics["output_disagreement"] = disagreement(head_products(heads, counts))
        if self.options.includes(*OF_CONTRIBUTIONS):
            bias = self.layer.weights.get("output.bias")
            products = contribution_products(heads, counts, self.output_weight, bias, self.options.direction)
            contribution = products.to_direction
            metrics |= {"contribution": contribution, "gradient_importance": gradient_importance(contribution)}
            metrics |= zero_ablation(products) | mean_ablation(products)
            metrics |= pruning_order(products) if self.options.includes("pruning_order") else {}
        return metrics

    def _counts(self, fully_masked: Tensor | None, heads: int) -> Tensor:
        """bool [b, h, q]: the rows that are neither fully masked nor padding."""
        b, q = self.call.query.shape[:2]
        counts = torch.ones(b, heads, q, dtype=torch.bool, device=self.call.query.device)
        if fully_masked is not None:
            counts &= ~fully_masked
        return counts if self.options.queries is None else counts & self.options.queries[:, None]
