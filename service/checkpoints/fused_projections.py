"""Layouts with queries, keys and values in one matrix. The layout decides how it is split; the shape does not show it.

* torch's MultiheadAttention: rows [q; k; v] (`in_proj_weight`), or three matrices if kdim or vdim differ; in both cases one bias.
* GPT-2: Conv1D, so [in, out], with columns [q | k | v]; cross-attention has a matrix q and another with columns [k | v].
* timm's ViT and `fused`: rows [q; k; v]. With fewer kv heads (spec `num_kv_heads`) k and v have fewer rows. Falcon-40B and Falcon 2 group
  their rows by kv head instead, [kv heads, queries of each + 2, head_dim]: under their name, `query_key_value`, that is refused.
* BLOOM and GPT-NeoX: rows [heads, (q, k, v), head_dim].

Both BLOOM and GPT-NeoX use the name `query_key_value`, so the caller must choose the layout; `neox` also needs `rope` with its `dims`
(rotary_pct x head_dim). Defaults: ALiBi for BLOOM, RoPE on halves for GPT-NeoX.
"""

from collections.abc import Callable, Mapping

import numpy as np

from service.checkpoints.layout import Converted, LayerTensors, Layout, Weights
from service.checkpoints.refusals import field_pointer
from service.checkpoints.separate_projections import FREQUENCIES, ROPE, rope_dims
from service.errors import InvalidRequest
from service.tensors import Array

KV_BIAS = "no bias_k and bias_v (add_bias_kv): attention weights have no column for such keys"


def torch_packed(tensors: LayerTensors) -> Converted:
    packed = tensors.get("qkv.weight", "3*embed_dim", "embed_dim")
    if packed.shape[0] != 3 * packed.shape[1]:
        raise tensors.misfit("qkv.weight", f"shape [{3 * packed.shape[1]}, {packed.shape[1]}], three square matrices")
    return Converted(_cut(tensors, packed, _thirds) | _output(tensors))


def torch_separate(tensors: LayerTensors) -> Converted:
    """The biases are packed, though the matrices are not."""
    matrices = [tensors.get(f"{name}.weight", "embed_dim", "in") for name in ("query", "key", "value")]
    return Converted(_named(matrices, "weight") | _cut_bias(tensors, 3 * len(matrices[0]), _thirds) | _output(tensors))


def gpt2(tensors: LayerTensors) -> Converted:
    """Conv1D computes x @ W + b, so weights are transposed."""
    packed = tensors.get("qkv.weight", "in", "3*in")
    if packed.shape[1] != 3 * packed.shape[0]:
        raise tensors.misfit("qkv.weight", f"shape [{packed.shape[0]}, {3 * packed.shape[0]}], a Conv1D (a Linear is layout fused)")
    return Converted(_cut(tensors, packed.T, _thirds) | _conv_output(tensors))


def gpt2_cross(tensors: LayerTensors) -> Converted:
    query, packed = tensors.get("query.weight", "in", "in"), tensors.get("kv.weight", "in", "2*in")
    if packed.shape[1] != 2 * query.shape[1]:
        raise tensors.misfit("kv.weight", f"shape [{packed.shape[0]}, {2 * query.shape[1]}], a Conv1D of keys and values")
    bias = tensors.get("kv.bias", "n")
    if len(bias) != packed.shape[1]:
        raise tensors.misfit("kv.bias", f"shape [{packed.shape[1]}]")
    weights = _named([query.T, *np.split(packed.T, 2)], "weight")
    biases = _named([tensors.get("query.bias", "n"), *np.split(bias, 2)], "bias")
    return Converted(weights | biases | _conv_output(tensors))


def stacked(tensors: LayerTensors) -> Converted:
    """Rows [q; k; v]; k and v have num_kv_heads / num_heads as many rows as q."""
    packed = tensors.get("qkv.weight", "out", "in")
    heads = tensors.number("num_heads") or 1
    kv_heads = tensors.number("num_kv_heads") or heads
    if 1 < kv_heads < heads and "query_key_value" in tensors.names["qkv.weight"]:
        expected = (
            f"{heads} or 1: with other numbers of kv heads, rows under query_key_value may be grouped by kv head (Falcon-40B, Falcon 2)"
        )
        expected += ", which is not read here. If they are [q; k; v], name the tensors qkv_proj and o_proj"
        raise InvalidRequest.where(field_pointer("num_kv_heads"), expected, str(kv_heads))
    width, rest = divmod(packed.shape[0], heads + 2 * kv_heads)
    if rest:
        raise tensors.misfit("qkv.weight", f"a multiple of {heads + 2 * kv_heads} rows, one head_dim for each head of q, k and v")
    cuts = [heads * width, (heads + kv_heads) * width]
    return Converted(_cut(tensors, packed, lambda x: np.split(x, cuts)) | _output(tensors), rope_dims(tensors))


def _per_head(tensors: LayerTensors) -> Weights:
    """Splits rows [heads, 3, head_dim]. Raises InvalidRequest without `num_heads`."""
    packed = tensors.get("qkv.weight", "out", "in")
    heads = tensors.number("num_heads")
    if heads is None:
        raise InvalidRequest.where(field_pointer("num_heads"), "the number of heads, which splits the rows", "nothing")
    if packed.shape[0] % (3 * heads):
        raise tensors.misfit("qkv.weight", f"a multiple of {3 * heads} rows, since num_heads is {heads}")
    return _cut(tensors, packed, lambda x: _heads_of(x, heads)) | _output(tensors)


def _heads_of(packed: Array, heads: int) -> list[Array]:
    cut = packed.reshape(heads, 3, -1, *packed.shape[1:])
    return [cut[:, i].reshape(-1, *packed.shape[1:]) for i in range(3)]


def bloom(tensors: LayerTensors) -> Converted:
    return Converted(_per_head(tensors), assumed={"alibi": True})


def neox(tensors: LayerTensors) -> Converted:
    given, known = tensors.given.get("rope"), rope_dims(tensors)
    if isinstance(given, Mapping) and given.get("dims") is None and not known:
        raise InvalidRequest.where(field_pointer("rope", "dims"), "how many dims are rotated, rotary_pct x head_dim", "nothing")
    return Converted(_per_head(tensors), known, {"rope": {"interleaved": False}})


def _named(three: list[Array], kind: str) -> Weights:
    return {f"{name}.{kind}": array for name, array in zip(("query", "key", "value"), three, strict=True)}


def _thirds(rows: Array) -> list[Array]:
    return np.split(rows, 3)


def _cut(tensors: LayerTensors, packed: Array, cut: Callable[[Array], list[Array]]) -> Weights:
    """Query, key and value: `cut` divides the rows of the packed weight [rows, in] and of its bias."""
    return _named(cut(packed), "weight") | _cut_bias(tensors, len(packed), cut)


def _cut_bias(tensors: LayerTensors, rows: int, cut: Callable[[Array], list[Array]]) -> Weights:
    if not tensors.has("qkv.bias"):
        return {}
    bias = tensors.get("qkv.bias", "n")
    if len(bias) != rows:
        raise tensors.misfit("qkv.bias", f"shape [{rows}]")
    return _named(cut(bias), "bias")


def _output(tensors: LayerTensors) -> Weights:
    weights = {"output.weight": tensors.get("output.weight", "out", "in")}
    return weights | ({"output.bias": tensors.get("output.bias", "n")} if tensors.has("output.bias") else {})


def _conv_output(tensors: LayerTensors) -> Weights:
    return {"output.weight": tensors.get("output.weight", "in", "out").T, "output.bias": tensors.get("output.bias", "n")}


def _fused_names(packed: str, output: str) -> dict[str, str]:
    roles = ((packed, "qkv"), (output, "output"))
    return {f"{name}.{kind}": f"{part}.{kind}" for name, part in roles for kind in ("weight", "bias")}


TORCH_OUT = {"out_proj.weight": "output.weight", "out_proj.bias": "output.bias", "in_proj_bias": "qkv.bias"}
TORCH_SEPARATE = {f"{letter}_proj_weight": f"{name}.weight" for letter, name in zip("qkv", ("query", "key", "value"), strict=True)}
TORCH_BIASES = (("qkv.bias", "output.bias"),)
TORCH_REFUSED = {"bias_k": KV_BIAS, "bias_v": KV_BIAS}
CROSS = {"q_attn.weight": "query.weight", "q_attn.bias": "query.bias", "c_attn.weight": "kv.weight", "c_attn.bias": "kv.bias"}
CROSS |= {"c_proj.weight": "output.weight", "c_proj.bias": "output.bias"}
MASKS = {"bias": 4, "masked_bias": 0}  # buffers of old GPT-2 and NeoX checkpoints: the causal mask and its fill value
QKV = _fused_names("query_key_value", "dense")
EITHER_BIAS = (("qkv.bias",), ("output.bias",))
SPELLED = (
    ("qkv", "proj"),
    ("query_key_value", "dense"),
    ("qkv_proj", "o_proj"),
    ("Wqkv", "out_proj"),
    ("in_proj", "out_proj"),
    ("c_attn", "c_proj"),
)

LAYOUTS = (
    Layout("torch_mha", {"in_proj_weight": "qkv.weight"} | TORCH_OUT, torch_packed, optional=TORCH_BIASES, refused=TORCH_REFUSED),
    Layout("torch_mha", TORCH_SEPARATE | TORCH_OUT, torch_separate, optional=TORCH_BIASES, refused=TORCH_REFUSED),
    Layout("gpt2", _fused_names("c_attn", "c_proj"), gpt2, ignored=MASKS),
    Layout("gpt2", CROSS, gpt2_cross, ignored=MASKS),
    Layout("vit", _fused_names("qkv", "proj"), stacked, optional=EITHER_BIAS),
    Layout("bloom", QKV, bloom, identified_under=()),
    Layout(
        "neox",
        QKV | FREQUENCIES,
        neox,
        optional=(("qkv.bias", "output.bias"), ("inv_freq",)),
        ignored=MASKS,
        required_fields=ROPE,
        identified_under=(),
    ),
    *(
        Layout(
            "fused", _fused_names(*names) | FREQUENCIES, stacked, optional=(*EITHER_BIAS, ("inv_freq",)), ignored=MASKS, identified_under=()
        )
        for names in SPELLED
    ),
)
