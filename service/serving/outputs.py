"""Shapes and V2 datatypes of the outputs of a call, and the size of a reply that has them."""

import math
from collections.abc import Mapping

from service.spec import LayerSpec
from service.tensors import BY_TORCH, DATATYPES

TEXT_BYTES = {1: 6, 2: 9, 4: 12, 8: 20}  # size of the datatype -> average bytes of a number in JSON; measured on normal variates
FIXED_DATATYPES = {"attention_weights.keys": "INT64", "indexer_mask": "BOOL"}  # of outputs that a request cannot choose


def output_shapes(spec: LayerSpec, b: int, q: int, k: int) -> dict[str, tuple[int, ...]]:
    """Output name -> shape, for b items of q queries and k keys, without a selection."""
    h, kv, joined = spec.num_heads, spec.num_kv_heads, spec.concatenated_dim
    return {
        "output": (b, q, spec.output_dim if spec.projections else joined),
        "attention_weights": (b, h, q, k),
        "scores": (b, h, q, k),
        "log_sum_exp": (b, h, q),
        "query_projection": (b, h, q, spec.head_dim),
        "key_projection": (b, kv, k, spec.head_dim),
        "value_projection": (b, kv, k, spec.value_head_dim),
        "head_outputs": (b, h, q, spec.value_head_dim),
        "concatenated": (b, q, joined),
        "indexer_mask": (b, q, k),
        "latent": (b, k, spec.latent.key_value_rank if spec.latent else 0),
        "rope_key": (b, k, spec.latent.rope_key_dim if spec.latent else 0),
        "query_gradient": (b, q, spec.query_dim),
        "key_gradient": (b, k, spec.key_dim),
        "value_gradient": (b, k, spec.value_dim),
    }


def wire_datatype(name: str, datatype: str | None, spec: LayerSpec) -> str:
    """The V2 datatype of an output in the reply; `datatype` is the requested one, None for the layer's."""
    return FIXED_DATATYPES.get(name) or datatype or BY_TORCH[spec.dtype].name


def reply_sizes(form: str, decimals: int | None, outputs: Mapping[str, tuple[int, ...]], datatypes: Mapping[str, str]) -> tuple[int, int]:
    """(bytes of a reply with tensors of these shapes and V2 datatypes, bytes of the tensors as binary). `form` is nested or base64."""
    reply, binary = 200, 0
    for name, shape in outputs.items():
        count, size = math.prod(shape), DATATYPES[datatypes[name]].size
        binary += count * size
        if form == "base64":
            reply += 80 + 4 * math.ceil(count * size / 3)
        else:
            reply += count * (TEXT_BYTES[size] if decimals is None else min(decimals + 4, TEXT_BYTES[size]))
    return reply, binary
