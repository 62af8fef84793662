"""Small models of transformers with random parameters, and what their own eager attention computes."""

from typing import Any

import numpy as np
import torch
from torch import nn

TOKENS = torch.tensor([[5, 7, 11, 13, 2, 3, 29], [17, 19, 23, 4, 6, 0, 0]])
PADDED = {"input_ids": TOKENS, "attention_mask": (TOKENS > 0).long()}
SIZES = {"hidden_size": 24, "intermediate_size": 17, "num_hidden_layers": 2, "num_attention_heads": 3, "vocab_size": 31}
KINDS = {"encoder_attentions": "encoder", "decoder_attentions": "decoder", "cross_attentions": "cross"}


def filled(model: nn.Module) -> Any:
    """The model with parameters so large that its heads attend sharply."""
    rng = np.random.default_rng(3)
    for parameter in model.parameters():
        parameter.data = torch.from_numpy(rng.standard_normal(tuple(parameter.shape)).astype(np.float32) * 0.5)
    return model.eval()


def own_attention(model: Any, inputs: dict[str, torch.Tensor]) -> dict[tuple[str, int], np.ndarray]:
    """The eager model's own weights of each layer, by part and number."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = model(**inputs, output_attentions=True)
    found = {}
    for name, part in {**KINDS, "attentions": ""}.items():
        for number, weights in enumerate(getattr(outputs, name, None) or ()):
            found[part, number] = weights.numpy()
    return found
