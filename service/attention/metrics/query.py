"""What is to be measured of a call, as arrays and plain numbers."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MetricsQuery:
    """Metrics by name, and what they need to be told. Tensors are None where no metric asked for needs them."""

    metrics: tuple[str, ...]
    local_window: int = 2
    top_links: int = 5
    mass: float = 0.9
    queries: Tensor | None = None  # bool [b|1, q]: which queries count; all if None
    query_words: Tensor | None = None  # int64 [b|1, q]: equal numbers are equal words ...
    key_words: Tensor | None = None  # ... [b|1, k]
    direction: Tensor | None = None  # [b, q, output_dim]

    def asks(self, *names: str) -> bool:
        """Whether any of these metrics is wanted."""
        return any(name in self.metrics for name in names)

    def to(self, device: torch.device) -> "MetricsQuery":
        """The question with its tensors on `device`."""
        names = ("queries", "query_words", "key_words", "direction")
        return replace(self, **{name: tensor.to(device) for name in names if (tensor := getattr(self, name)) is not None})
