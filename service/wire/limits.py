"""How much the wire takes in before it says `TooLarge`. Values, not policy: `Settings` fills them in, and the client uses the defaults."""

from dataclasses import dataclass

MIB = 1024 * 1024
JSON_TEXT_BYTES = 1 << 20  # of JSON text inside a JSON or protobuf message: a parameter, or an entry of safetensors metadata


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Bounds on one body."""

    body_bytes: int = 128 * MIB
    layer_bytes: int = 1024 * MIB  # of a safetensors body that brings a layer
    depth: int = 64
    tensors: int = 1024  # in one body; looking up each member of an object takes a walk along all of them
    values: int = 1 << 17  # plain values of one body: all that is no number of a tensor
    lists: int = 1 << 21  # in one body, those of tensors among them
