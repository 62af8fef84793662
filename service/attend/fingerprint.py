"""The fingerprint of a spec and its weights, which identifies the results of a layer. Tier 1."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from attend.spec import LayerSpec
from attend.tensors import Array, datatype_of, raw

UNRELATED = frozenset({"seed", "init", "gain", "matmul_precision"})  # fields by which results do not differ, or which weights have

# The fields of 0.1.0, of a spec and of its parts that had others later. A fingerprint leaves out these others at their defaults, so that
# those of layers without them remain valid.
FIRST_FIELDS: Mapping[str, frozenset[str]] = {
    "": frozenset(
        {
            *("d_model", "num_heads", "num_kv_heads", "head_dim", "value_head_dim", "key_dim", "value_dim", "output_dim", "bias", "scale"),
            *("projections", "softcap", "window", "rope", "alibi", "relative_bias", "qk_norm", "sinks", "dtype"),
        }
    ),
    "rope": frozenset({"theta", "dims", "interleaved", "scaling"}),
    "qk_norm": frozenset({"kind", "eps"}),
}


def fingerprint(spec: LayerSpec, weights: Mapping[str, Array]) -> str:
    """SHA-256, in hex, of the spec and the weights.

    The digest is of the canonical JSON of the spec (sorted keys, no spaces, defaults filled in, without `seed`, `init`, `gain`,
    `matmul_precision` and the fields that are newer than 0.1.0 at their defaults), then for each weight in order of name a line
    `name dtype shape\\n` (`query.weight FP32 [64,64]`) and its little-endian row-major bytes.
    """
    document = _without_newer_defaults(spec.model_dump(mode="json", exclude=set(UNRELATED)), LayerSpec, "")
    for name in {*FIRST_FIELDS} & {*document}:
        if (part := getattr(spec, name)) is not None:
            document[name] = _without_newer_defaults(document[name], type(part), name)
    digest = hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())
    for name in sorted(weights):
        array = weights[name]
        shape = json.dumps(list(array.shape), separators=(",", ":"))
        digest.update(f"{name} {datatype_of(array).name} {shape}\n".encode())
        digest.update(raw(array))
    return digest.hexdigest()


def _without_newer_defaults(fields: Mapping[str, Any], model: type[BaseModel], name: str) -> dict[str, Any]:
    """The fields of a spec, or of its part of this name, but those that are newer than 0.1.0 and at their defaults."""
    first, defaults = FIRST_FIELDS[name], {field: info.default for field, info in model.model_fields.items()}
    return {field: value for field, value in fields.items() if field in first or value != defaults[field]}
