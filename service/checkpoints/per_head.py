"""Layouts whose kernels have an axis for the heads, so that the shape shows their number: Keras, Flax, TransformerLens.

* Keras' MultiHeadAttention and GroupQueryAttention, Flax' MultiHeadDotProductAttention (linen) and MultiHeadAttention (nnx): kernels
  [in, heads, dim], biases [heads, dim], output kernel [heads, dim, out]. Keras' files call the same `query_dense/vars/0`.
* TransformerLens: W_Q [heads, in, dim], b_Q [heads, dim], W_O [heads, dim, out]; grouped keys and values under `_W_K`, `_W_V`.

Flax with normalize_qk has layer norms on queries and keys; the default eps is 1e-6, as in Flax. A TransformerLens checkpoint with
`rotary_sin` is of a model with RoPE: the spec must have `rope`.
"""

from service.checkpoints.layout import ALL_BIASES, QKV_BIASES, Converted, LayerTensors, Layout, Weights, linear_names
from service.checkpoints.refusals import field_pointer
from service.checkpoints.separate_projections import ROPE
from service.errors import InvalidRequest
from service.tensors import Array

HEADS_MIDDLE = ("in", "heads", "dim")
HEADS_FIRST = ("heads", "in", "dim")


def middle(tensors: LayerTensors) -> Converted:
    """Kernels [in, heads, dim] -> [heads*dim, in]."""
    kernels = {name: tensors.get(f"{name}.weight", *HEADS_MIDDLE) for name in ("query", "key", "value")}
    known = _known_heads(tensors, {name: kernel.shape[1:] for name, kernel in kernels.items()})
    weights: Weights = {f"{name}.weight": kernel.reshape(kernel.shape[0], -1).T for name, kernel in kernels.items()}
    return Converted(weights | _rest(tensors), known, {"qk_norm": {"kind": "layer", "eps": 1e-6}})


def first(tensors: LayerTensors) -> Converted:
    """Kernels [heads, in, dim] -> [heads*dim, in]; copied."""
    if tensors.has("rotary") and "rope" not in tensors.given:
        raise InvalidRequest.where(field_pointer("rope"), ROPE["rope"], "nothing")
    kernels = {name: tensors.get(f"{name}.weight", *HEADS_FIRST) for name in ("query", "key", "value")}
    known = _known_heads(tensors, {name: (kernel.shape[0], kernel.shape[2]) for name, kernel in kernels.items()})
    weights: Weights = {f"{name}.weight": _flattened(kernel) for name, kernel in kernels.items()}
    return Converted(weights | _rest(tensors), known)


def _flattened(kernel: Array) -> Array:
    return kernel.transpose(0, 2, 1).reshape(-1, kernel.shape[1])


def _known_heads(tensors: LayerTensors, heads: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Numbers and widths of heads, from the axes (heads, dim) of each projection. Raises InvalidRequest if they disagree."""
    (count, dim), (kv, key_dim), (value_count, value_dim) = heads["query"], heads["key"], heads["value"]
    if key_dim != dim:
        raise tensors.misfit("key.weight", f"heads of width {dim}, as the queries have")
    if not kv or count % kv:
        raise tensors.misfit("key.weight", f"a number of heads that divides {count}, the queries'")
    if value_count != kv:
        raise tensors.misfit("value.weight", f"{kv} heads, as the keys have")
    if tensors.get("output.weight", "heads", "dim", "out").shape[:2] != (count, value_dim):
        raise tensors.misfit("output.weight", f"shape [{count}, {value_dim}, out]")
    for name, shape in heads.items():
        if tensors.has(f"{name}.bias") and tensors.arrays[f"{name}.bias"].shape != shape:
            raise tensors.misfit(f"{name}.bias", f"shape {list(shape)}")
    return {"num_heads": count, "num_kv_heads": kv, "head_dim": dim, "value_head_dim": value_dim}


def _rest(tensors: LayerTensors) -> Weights:
    """The output's kernel [heads, dim, out] -> [out, heads*dim]; biases flattened; norm weights unchanged."""
    kernel = tensors.arrays["output.weight"]
    weights: Weights = {"output.weight": kernel.reshape(-1, kernel.shape[2]).T}
    weights |= {part: tensors.arrays[part].reshape(-1) for part in QKV_BIASES if tensors.has(part)}
    others = ("output.bias", "query_norm.weight", "key_norm.weight")
    return weights | {part: tensors.get(part, "n") for part in others if tensors.has(part)}


def _lens_names(grouped: str) -> dict[str, str]:
    """Grouped attention stores `_W_K` and `_W_V`; `W_K` and `W_V` are computed from them."""
    letters = {"query": "Q", "key": "K", "value": "V", "output": "O"}
    marks = {name: grouped if name in ("key", "value") else "" for name in letters}
    weights = {f"{marks[name]}W_{letter}": f"{name}.weight" for name, letter in letters.items()}
    return weights | {f"{marks[name]}b_{letter}": f"{name}.bias" for name, letter in letters.items()} | {"rotary_sin": "rotary"}


FLAX_NORMS = {"query_ln.scale": "query_norm.weight", "key_ln.scale": "key_norm.weight"}
KERAS_PATHS = linear_names("query", "key", "value", "attention_output", weight="kernel", bias="bias")
KERAS_FILE = linear_names("query_dense", "key_dense", "value_dense", "output_dense", weight="vars.0", bias="vars.1")
FLAX = linear_names("query", "key", "value", "out", weight="kernel", bias="bias") | FLAX_NORMS
SEEDS = {"*seed_generator*": None}  # the state of a layer with dropout
LENS_OPTIONS = (QKV_BIASES, ("output.bias",), ("rotary",))
LENS_BUFFERS = {"mask": 2, "IGNORE": 0, "rotary_cos": 2}

LAYOUTS = (
    Layout("keras", KERAS_PATHS, middle, optional=(ALL_BIASES,), ignored=SEEDS),
    Layout("keras", KERAS_FILE, middle, optional=(ALL_BIASES,), ignored=SEEDS),
    Layout("flax", FLAX, middle, optional=(ALL_BIASES, tuple(FLAX_NORMS.values()))),
    Layout("transformerlens", _lens_names(""), first, optional=LENS_OPTIONS, ignored=LENS_BUFFERS),
    Layout("transformerlens", _lens_names("_"), first, optional=LENS_OPTIONS, ignored=LENS_BUFFERS),
)
