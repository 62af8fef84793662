"""Layouts whose kernels have an axis for the heads, and so tell their number: Keras, Flax, TransformerLens.

* Keras' MultiHeadAttention and GroupQueryAttention, Flax' MultiHeadDotProductAttention (linen) and MultiHeadAttention (nnx): kernels
  [in, heads, dim], biases [heads, dim], output kernel [heads, dim, out]. Keras' files spell the same `query_dense/vars/0`.
* TransformerLens: W_Q [heads, in, dim], b_Q [heads, dim], W_O [heads, dim, out]; grouped keys and values under `_W_K`, `_W_V`.

Flax with normalize_qk has layer norms on queries and keys; eps 1e-6 is assumed, Flax' own default. A TransformerLens checkpoint of a
rotary model keeps tables of sines: then the spec must say `rope`.
"""

from service.checkpoints.layout import ALL_BIASES, QKV_BIASES, Found, Layout, Read, Weights
from service.checkpoints.problems import field_pointer
from service.checkpoints.separate_projections import ROPE
from service.errors import InvalidRequest
from service.tensors import Array

HEADS_MIDDLE = ("in", "heads", "dim")
HEADS_FIRST = ("heads", "in", "dim")


def middle(found: Found) -> Read:
    """Kernels [in, heads, dim] -> [heads*dim, in]."""
    kernels = {name: found.get(f"{name}.weight", *HEADS_MIDDLE) for name in ("query", "key", "value")}
    told = _told(found, {name: kernel.shape[1:] for name, kernel in kernels.items()})
    weights: Weights = {f"{name}.weight": kernel.reshape(kernel.shape[0], -1).T for name, kernel in kernels.items()}
    return Read(weights | _rest(found), told, {"qk_norm": {"kind": "layer", "eps": 1e-6}})


def first(found: Found) -> Read:
    """Kernels [heads, in, dim] -> [heads*dim, in]; numbers move, so this one copies."""
    if found.has("rotary") and "rope" not in found.given:
        raise InvalidRequest.where(field_pointer("rope"), ROPE["rope"], "nothing")
    kernels = {name: found.get(f"{name}.weight", *HEADS_FIRST) for name in ("query", "key", "value")}
    told = _told(found, {name: (kernel.shape[0], kernel.shape[2]) for name, kernel in kernels.items()})
    weights: Weights = {f"{name}.weight": _flattened(kernel) for name, kernel in kernels.items()}
    return Read(weights | _rest(found), told)


def _flattened(kernel: Array) -> Array:
    return kernel.transpose(0, 2, 1).reshape(-1, kernel.shape[1])


def _told(found: Found, heads: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Head counts and widths, once they agree: [heads, dim] of each projection, and of the output's kernel."""
    (count, dim), (kv, key_dim), (value_count, value_dim) = heads["query"], heads["key"], heads["value"]
    if key_dim != dim:
        raise found.misfit("key.weight", f"heads of width {dim}, as the queries have")
    if not kv or count % kv:
        raise found.misfit("key.weight", f"a number of heads that divides {count}, the queries'")
    if value_count != kv:
        raise found.misfit("value.weight", f"{kv} heads, as the keys have")
    if found.get("output.weight", "heads", "dim", "out").shape[:2] != (count, value_dim):
        raise found.misfit("output.weight", f"shape [{count}, {value_dim}, out]")
    for name, shape in heads.items():
        if found.has(f"{name}.bias") and found.arrays[f"{name}.bias"].shape != shape:
            raise found.misfit(f"{name}.bias", f"shape {list(shape)}")
    return {"num_heads": count, "num_kv_heads": kv, "head_dim": dim, "value_head_dim": value_dim}


def _rest(found: Found) -> Weights:
    """The output's kernel [heads, dim, out] -> [out, heads*dim], biases flat, norms as they are."""
    kernel = found.arrays["output.weight"]
    weights: Weights = {"output.weight": kernel.reshape(-1, kernel.shape[2]).T}
    weights |= {part: found.arrays[part].reshape(-1) for part in QKV_BIASES if found.has(part)}
    others = ("output.bias", "query_norm.weight", "key_norm.weight")
    return weights | {part: found.get(part, "n") for part in others if found.has(part)}


def _names(query: str, key: str, value: str, output: str, weight: str, bias: str) -> dict[str, str]:
    parts = (("query", query), ("key", key), ("value", value), ("output", output))
    kinds = (("weight", weight), ("bias", bias))
    return {f"{path}.{spelling}": f"{name}.{kind}" for name, path in parts for kind, spelling in kinds}


def _lens_names(grouped: str) -> dict[str, str]:
    """`_W_K` and `_W_V` of grouped attention are the tensors; the names without the underscore are made from them."""
    letters = {"query": "Q", "key": "K", "value": "V", "output": "O"}
    marks = {name: grouped if name in ("key", "value") else "" for name in letters}
    weights = {f"{marks[name]}W_{letter}": f"{name}.weight" for name, letter in letters.items()}
    return weights | {f"{marks[name]}b_{letter}": f"{name}.bias" for name, letter in letters.items()} | {"rotary_sin": "rotary"}


FLAX_NORMS = {"query_ln.scale": "query_norm.weight", "key_ln.scale": "key_norm.weight"}
KERAS_PATHS = _names("query", "key", "value", "attention_output", "kernel", "bias")
KERAS_FILE = _names("query_dense", "key_dense", "value_dense", "output_dense", "vars.0", "vars.1")
FLAX = _names("query", "key", "value", "out", "kernel", "bias") | FLAX_NORMS
SEEDS = {"*seed_generator*": None}  # the state of a layer with dropout
LENS_OPTIONS = (QKV_BIASES, ("output.bias",), ("rotary",))
LENS_BUFFERS = {"mask": 2, "IGNORE": 0, "rotary_cos": 2}

FORMS = (
    Layout("keras", KERAS_PATHS, middle, optional=(ALL_BIASES,), aside=SEEDS),
    Layout("keras", KERAS_FILE, middle, optional=(ALL_BIASES,), aside=SEEDS),
    Layout("flax", FLAX, middle, optional=(ALL_BIASES, tuple(FLAX_NORMS.values()))),
    Layout("transformerlens", _lens_names(""), first, optional=LENS_OPTIONS, aside=LENS_BUFFERS),
    Layout("transformerlens", _lens_names("_"), first, optional=LENS_OPTIONS, aside=LENS_BUFFERS),
)
