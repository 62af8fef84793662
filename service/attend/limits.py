"""The limits of a server: sections of the settings, whose fields and defaults these are. The client reads bodies within the defaults."""

from dataclasses import dataclass

MIB = 1024 * 1024
READY_SECONDS = 2.0  # in which a working device answers a check
JSON_TEXT_BYTES = 1 << 20  # of JSON text in a parameter of V2, or in an entry of safetensors metadata


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Bounds on one body; a body beyond one is refused with `TooLarge`."""

    max_body_bytes: int = 128 * MIB
    max_layer_bytes: int = 1024 * MIB  # of a safetensors body with a layer's weights
    max_depth: int = 64
    max_tensors: int = 1024  # in a safetensors body, and members of one JSON object
    values: int = 1 << 17  # in one JSON text that are not elements of tensors; no setting
    lists: int = 1 << 21  # in one tensor that is written as nested lists; no setting


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """Bounds on layers and calls."""

    max_layer_parameters: int = 1 << 28
    max_total_parameters: int = 1 << 30
    max_layers: int = 1000
    max_layer_width: int = 1 << 16  # of the rows of any input, projection or output of a layer
    max_scores: int = 1 << 28  # batch * heads * queries * keys that [q, k] outputs may hold
    max_memory_bytes: int = 4096 * MIB
    max_operations: int = 10**13
    max_batch_items: int = 65536
    max_pairs: int = 1 << 36  # heads * queries * keys of one item
    max_reply_bytes: int = 2048 * MIB


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The largest total cost of the waiting calls. `batch_delay`: seconds that a call to an idle device waits for others."""

    max_queue_operations: int = 2 * 10**12
    max_queue_bytes: int = 2048 * MIB
    batch_delay: float = 0.0


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The largest cost of one batch. A call that exceeds it runs alone."""

    calls: int = 64
    operations: int = 4_000_000_000
    memory_bytes: int = 1 << 29
