"""Computes metrics of a layer and a call: the operation that serving runs in place of the forward pass.

Metrics of weights read one block of query rows at a time. If a metric needs head outputs, they come from the layer's forward pass, which
may compute them without weights.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from service.attention.call import Call, Result
from service.attention.eager import row_blocks
from service.attention.layer import MultiHeadAttention
from service.attention.masks import open_keys
from service.attention.metrics import heads as between
from service.attention.metrics import importance
from service.attention.metrics.heads import SingleHead, as_single_head
from service.attention.metrics.rows import ROW_METRICS, Block, MetricsQuery, StrongestLinks, read_block

Projected = tuple[Tensor, Tensor, Tensor]  # query, key, value, [b, heads, n, d]
PER_QUERY = "_per_query"
OF_WEIGHTS = {"strongest_links", "cosine_similarity", "jensen_shannon", "position_disagreement", "deviation_across_heads", "single_head"}
OF_WEIGHTS |= {"value_norm_weights", *ROW_METRICS, *(name + PER_QUERY for name in ROW_METRICS)}
OVERFLOWED = "overflowed"  # name of a bool tensor in the result: whether an input of the metrics is not finite
OF_PRODUCTS = ("contribution", "gradient_importance", "zero_ablation", "mean_ablation", "pruning_order")


@dataclass(frozen=True, slots=True)
class MetricsOperation:
    """The operation that computes metrics instead of outputs. It ignores the call's selection of weights."""

    query: MetricsQuery

    def __call__(self, layer: MultiHeadAttention, call: Call) -> Result:
        return measure(layer, replace(call, heads=None, queries=None), self.query)

    def to(self, device: torch.device) -> "MetricsOperation":
        return MetricsOperation(self.query.to(device))


@torch.inference_mode()
def measure(layer: MultiHeadAttention, call: Call, metrics_query: MetricsQuery) -> Result:
    """Compute the requested metrics: name, or `name.part`, -> tensor [b, …], float64, or int64 for indices.

    The call must have no selection of weights and no dropout. The tensor `overflowed` is true if an input of the metrics is not finite, so
    that some numbers are missing or NaN.
    """
    query, key, value = layer.project(call)
    fully_masked = layer.fully_masked(call)
    real = open_keys(call.masks, call.key.shape[0])
    made: dict[str, Tensor] = {}
    norms, overflowed = None, [torch.zeros((), dtype=torch.bool, device=query.device)]
    if metrics_query.asks("value_norms", "value_norm_weights", "subspace_disagreement"):
        overflowed.append((~torch.isfinite(value).all(-1) & real[:, None]).any())
    if metrics_query.asks("value_norms", "value_norm_weights"):
        norms = importance.value_norms(value, layer.weights.get("output.weight"), layer.spec.num_heads // layer.spec.num_kv_heads, real)
        norms = norms if call.head_scale is None else norms * call.head_scale[..., 0].abs()
        made["value_norms"] = norms
    if OF_WEIGHTS & set(metrics_query.metrics):
        made |= _read_weights(layer, call, metrics_query, (query, key, value), fully_masked, real, norms)
        overflowed.append(made[OVERFLOWED])
    if metrics_query.asks("subspace_disagreement"):
        made["subspace_disagreement"] = between.disagreement(between.subspace_products(value, real))
    if metrics_query.asks("output_disagreement", *OF_PRODUCTS):
        made |= _read_outputs(layer, call, metrics_query, fully_masked)
        overflowed.append(made[OVERFLOWED])
    wanted = {name: tensor for name, tensor in made.items() if name.partition(".")[0] in metrics_query.metrics}
    return Result({**wanted, OVERFLOWED: torch.stack(overflowed).any()}, fully_masked)


def _read_weights(
    layer: MultiHeadAttention,
    call: Call,
    metrics_query: MetricsQuery,
    projected: Projected,
    fully_masked: Tensor | None,
    real: Tensor,
    norms: Tensor | None,
) -> dict[str, Tensor]:
    """Compute all metrics of weights in one pass over the query rows."""
    rows: dict[str, list[Tensor]] = {name: [] for name in ROW_METRICS if metrics_query.asks(name, name + PER_QUERY)}
    links, likeness, jensen_shannon = StrongestLinks(metrics_query.top_links), between.CosineSimilarity(), between.JensenShannon()
    likened = metrics_query.asks("cosine_similarity", "position_disagreement")
    raw = ((links, metrics_query.asks("strongest_links")), (likeness, likened), (jensen_shannon, metrics_query.asks("jensen_shannon")))
    readers = [reader for reader, wanted in raw if wanted]
    deviations: list[Tensor] = []
    value_norm_weights: list[Tensor] = []
    overflowed: list[Tensor] = []
    for block in _blocks(layer, call, metrics_query, projected, fully_masked, real):
        overflowed.append(block.overflowed.any())
        for name, parts in rows.items():
            parts.append(block.of_counted(ROW_METRICS[name](block, metrics_query)))
        for reader in readers:
            reader.read(block)
        if metrics_query.asks("deviation_across_heads"):
            deviations.append(between.deviation(block))
        if norms is not None and metrics_query.asks("value_norm_weights"):
            sizes = block.weights * norms.nan_to_num(0)[:, :, None].to(block.weights.dtype)
            value_norm_weights.append(sizes.masked_fill(~block.counts[..., None], torch.nan))
    made = {name + PER_QUERY: torch.cat(parts, -1) for name, parts in rows.items()}
    made |= {name: made[name + PER_QUERY].nanmean(-1) for name in rows} | {OVERFLOWED: torch.stack(overflowed).any()}
    if links in readers:
        made |= {f"strongest_links.{part}": tensor for part, tensor in links.parts().items()}
    if likened:
        made["cosine_similarity"] = likeness.cosine_similarity()
        made["position_disagreement"] = likeness.position_disagreement()
    if jensen_shannon in readers:
        made["jensen_shannon"] = jensen_shannon.mean()
    if deviations:
        made["deviation_across_heads"] = torch.cat(deviations, -1)
    if value_norm_weights:
        made["value_norm_weights"] = torch.cat(value_norm_weights, 2)
    if metrics_query.asks("single_head"):
        made |= _compare_single(layer, call, metrics_query, projected, fully_masked, real)
    return made


def _blocks(
    layer: MultiHeadAttention,
    call: Call,
    metrics_query: MetricsQuery,
    projected: Projected,
    fully_masked: Tensor | None,
    real: Tensor,
    rows: Iterable[slice] | None = None,
) -> Iterator[Block]:
    first_key = real.to(torch.int8).argmax(-1)  # the first that is not padding
    for some, weights, visible in layer.attention_weights(call, projected[0], projected[1], fully_masked, rows):
        yield read_block(some, weights, visible, call.masks.positions, fully_masked, first_key, metrics_query)


def _compare_single(
    layer: MultiHeadAttention, call: Call, metrics_query: MetricsQuery, projected: Projected, fully_masked: Tensor | None, real: Tensor
) -> dict[str, Tensor]:
    """Compare the layer with a layer of one head, in blocks of the same rows."""
    alone, *one = as_single_head(call, *projected)
    none = None if fully_masked is None else fully_masked.all(1, keepdim=True)
    single = SingleHead()
    wide = (one[0], one[1], one[2])
    batch, heads, num_queries, _ = projected[0].shape
    rows = tuple(row_blocks(batch * heads * call.masks.num_keys, num_queries))
    many = _blocks(layer, call, metrics_query, projected, fully_masked, real, rows)
    for block, of_many in zip(_blocks(layer, alone, metrics_query, wide, none, real, rows), many, strict=True):
        single.read(block, of_many, one[2])
    output = layer.forward(replace(call, outputs=frozenset({"output"}))).tensors["output"]
    alike = layer.project_back(single.outputs.to(layer.dtype), call)
    counts = _counts(call, metrics_query, none, 1)[:, 0]
    return {f"single_head.{part}": tensor for part, tensor in single.parts(output, alike, counts).items()}


def _read_outputs(layer: MultiHeadAttention, call: Call, metrics_query: MetricsQuery, fully_masked: Tensor | None) -> dict[str, Tensor]:
    """Compute all metrics of head outputs."""
    heads = layer.forward(replace(call, outputs=frozenset({"head_outputs"}))).tensors["head_outputs"]
    counts = _counts(call, metrics_query, fully_masked, heads.shape[1])
    made = {OVERFLOWED: (~torch.isfinite(heads).all(-1) & counts).any()}
    if metrics_query.asks("output_disagreement"):
        made["output_disagreement"] = between.disagreement(between.output_products(heads, counts))
    if metrics_query.asks(*OF_PRODUCTS):
        weights = layer.weights
        found = importance.products(heads, counts, weights.get("output.weight"), weights.get("output.bias"), metrics_query.direction)
        made["contribution"] = found.to_direction
        made["gradient_importance"] = importance.gradient_importance(found.to_direction)
        for name, parts in (
            ("zero_ablation", importance.zero_ablation(found)),
            ("mean_ablation", importance.mean_ablation(found)),
            ("pruning_order", importance.pruning_order(found) if metrics_query.asks("pruning_order") else {}),
        ):
            made |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    return made


def _counts(call: Call, metrics_query: MetricsQuery, fully_masked: Tensor | None, heads: int) -> Tensor:
    """bool [b, h, q]: the rows that are neither fully masked nor padding."""
    counts = torch.ones(call.query.shape[0], heads, call.query.shape[1], dtype=torch.bool, device=call.query.device)
    if fully_masked is not None:
        counts &= ~fully_masked
    return counts if metrics_query.queries is None else counts & metrics_query.queries[:, None]
