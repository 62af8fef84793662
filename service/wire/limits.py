"""How much the wire takes in before it says `TooLarge`. Values, not policy: `Settings` fills them in, and the client uses the defaults."""

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Bounds on one body. `scan_bytes`: above it a fault's exact place is not searched for, the field alone is named."""

    body_bytes: int = 128 * MIB
    layer_bytes: int = 1024 * MIB  # of a safetensors body that brings a layer
    depth: int = 64
    tensors: int = 1024  # in one body; looking up each member of an object takes a walk along all of them
    scan_bytes: int = 8 * MIB
