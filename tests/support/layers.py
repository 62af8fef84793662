"""A layer twice, tuned and not, and calls of it."""

from dataclasses import replace
from typing import Any

import torch

from service.attention.call import Call
from service.attention.layer import MultiHeadAttention
from service.attention.masks import Masks
from service.attention.weights import draw_weights
from service.attention.whole import OUTPUTS
from service.spec import LayerSpec

CPU = torch.device("cpu")
TOLERANCE = {"float32": 1e-6, "float64": 1e-14}


def make(**fields: Any) -> tuple[MultiHeadAttention, MultiHeadAttention]:
    """A layer that may take the short cut, where it is one that can, and the same that has never been told of it."""
    spec = LayerSpec.model_validate(fields)
    weights = {name: torch.from_numpy(array).to(getattr(torch, spec.dtype)) for name, array in draw_weights(spec).items()}
    tuned, plain = (MultiHeadAttention(spec, weights, CPU) for _ in range(2))
    tuned.tune()
    return tuned, plain


def call_of(layer: MultiHeadAttention, batch: int, rows: int, seed: int = 0, **fields: Any) -> Call:
    spec = layer.spec
    draw = torch.randn(3, batch, rows, spec.d_model, generator=torch.Generator().manual_seed(seed), dtype=layer.dtype)
    masks = fields.pop("masks", Masks(torch.arange(rows)[None], rows, aligned=True))
    return replace(Call(*draw.unbind(0), masks, spec.scale, OUTPUTS), **fields)
