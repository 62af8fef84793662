"""A layer with and without a path for short calls, calls of it, and requests as JSON."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from attend.attention.call import Call
from attend.attention.initialization import draw_weights
from attend.attention.kernels.short import ShortKernel
from attend.attention.layer import MultiHeadAttention
from attend.attention.masks import Masks
from attend.spec import LayerSpec
from support import calls

CPU = torch.device("cpu")
TOLERANCE = {"float32": 1e-6, "float64": 1e-14}


def make(**fields: Any) -> tuple[MultiHeadAttention, MultiHeadAttention]:
    """A layer, and the same without a path for short calls."""
    spec = LayerSpec.model_validate(fields)
    weights = {name: torch.from_numpy(array).to(getattr(torch, spec.dtype)) for name, array in draw_weights(spec).items()}
    layer, plain = (MultiHeadAttention(spec, weights, CPU) for _ in range(2))
    plain.short = None
    return layer, plain


def call_of(layer: MultiHeadAttention, batch: int, rows: int, seed: int = 0, **fields: Any) -> Call:
    """Self-attention, unless `fields` say otherwise."""
    query = torch.randn(batch, rows, layer.spec.d_model, generator=torch.Generator().manual_seed(seed), dtype=layer.dtype)
    masks = fields.pop("masks", rows_masks(rows, aligned=True))
    inputs = [fields.pop(name, query) for name in ("query", "key", "value")]
    return calls.call_of(*inputs, masks, layer.spec.scale, fields.pop("outputs", ShortKernel.outputs), **fields)


def rows_masks(rows: int, **fields: Any) -> Masks:
    return Masks(torch.arange(rows)[None], rows, **fields)


def json_body(request: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a request as nested lists, with -inf as the string "-inf"."""

    def plain(x: Any) -> Any:
        return [plain(item) for item in x] if isinstance(x, list) else "-inf" if x == -np.inf else x

    return {name: plain(x.tolist()) if isinstance(x, np.ndarray) else x for name, x in request.items()}
