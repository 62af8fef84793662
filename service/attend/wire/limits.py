"""Limits of bodies; a body beyond one is refused with `TooLarge`. `Settings` sets the server's; the client uses the defaults."""

from dataclasses import dataclass

MIB = 1024 * 1024
JSON_TEXT_BYTES = 1 << 20  # of JSON text in a parameter of V2, or in an entry of safetensors metadata


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Limits of one body."""

    body_bytes: int = 128 * MIB
    layer_bytes: int = 1024 * MIB  # of a safetensors body with a layer's weights
    depth: int = 64
    tensors: int = 1024  # in a safetensors body, and members of one JSON object
    values: int = 1 << 17  # in one JSON text that are not elements of tensors
    lists: int = 1 << 21  # in one tensor that is written as nested lists
