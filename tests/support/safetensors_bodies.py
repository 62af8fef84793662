"""Writes and reads bodies in safetensors with the format's own library."""

from typing import Any

import numpy as np
from safetensors.numpy import load, save


def safetensors(tensors: dict[str, Any], **metadata: str) -> bytes:
    """A body with these tensors and entries of the metadata."""
    return save({name: np.ascontiguousarray(array) for name, array in tensors.items()}, metadata)


def read_safetensors(body: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors and the metadata of a body."""
    import json

    size = int.from_bytes(body[:8], "little")
    return load(body), json.loads(body[8 : 8 + size]).get("__metadata__", {})
