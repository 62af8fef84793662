"""Layouts that keep queries, keys and values in one matrix. How it is cut is the whole question: its shape never tells.

* torch's MultiheadAttention: rows [q; k; v] (`in_proj_weight`), or three matrices where kdim or vdim differ, but one bias in both cases.
* GPT-2: Conv1D, so [in, out], with columns [q | k | v]; attention to an encoder has q apart and columns [k | v].
* timm's ViT and `fused`: rows [q; k; v]. With fewer kv heads (spec `num_kv_heads`) k and v have fewer rows. Falcon-40B and Falcon 2 group
  their rows by kv head instead, [kv heads, queries of each + 2, head_dim]: under their name, `query_key_value`, that is refused.
* BLOOM and GPT-NeoX: rows [heads, (q, k, v), head_dim], each head's three together.

`query_key_value` stands for both of the last two in the wild, so there the layout must be said; of `neox` also `rope` with its `dims`
(rotary_pct x head_dim). BLOOM is assumed to have ALiBi, GPT-NeoX RoPE on halves.
"""

from collections.abc import Mapping

import numpy as np

from service.checkpoints.layout import Found, Layout, Read, Weights
from service.checkpoints.problems import field_pointer
from service.checkpoints.separate_projections import FREQUENCIES, ROPE, rope_told
from service.errors import InvalidRequest
from service.tensors import Array

KV_BIAS = "no bias_k and bias_v (add_bias_kv): keys that are no token's have no place in attention weights"


def torch_packed(found: Found) -> Read:
    packed = found.get("qkv.weight", "3*embed_dim", "embed_dim")
    if packed.shape[0] != 3 * packed.shape[1]:
        raise found.misfit("qkv.weight", f"shape [{3 * packed.shape[1]}, {packed.shape[1]}], three square matrices")
    return Read(_named(np.split(packed, 3), "weight") | _torch_biases(found, packed.shape[1]) | _output(found))


def torch_separate(found: Found) -> Read:
    matrices = [found.get(f"{name}.weight", "embed_dim", "in") for name in ("query", "key", "value")]
    return Read(_named(matrices, "weight") | _torch_biases(found, matrices[0].shape[0]) | _output(found))


def gpt2(found: Found) -> Read:
    """Conv1D computes x @ W + b, so everything is transposed before it is cut."""
    packed = found.get("qkv.weight", "in", "3*in")
    if packed.shape[1] != 3 * packed.shape[0]:
        raise found.misfit("qkv.weight", f"shape [{packed.shape[0]}, {3 * packed.shape[0]}], a Conv1D (a Linear is layout fused)")
    weights = _named(np.split(packed.T, 3), "weight") | _named(_cut(found, "qkv.bias", 3), "bias")
    return Read(weights | _conv_output(found))


def gpt2_cross(found: Found) -> Read:
    query, packed = found.get("query.weight", "in", "in"), found.get("kv.weight", "in", "2*in")
    if packed.shape[1] != 2 * query.shape[1]:
        raise found.misfit("kv.weight", f"shape [{packed.shape[0]}, {2 * query.shape[1]}], a Conv1D of keys and values")
    key, value = np.split(packed.T, 2)
    key_bias, value_bias = _cut(found, "kv.bias", 2)
    weights = _named([query.T, key, value], "weight") | _named([found.get("query.bias", "n"), key_bias, value_bias], "bias")
    return Read(weights | _conv_output(found))


def rows(found: Found) -> Read:
    """Rows [q; k; v], where k and v have num_kv_heads/num_heads as many as q; a third each if the spec names no kv heads."""
    packed = found.get("qkv.weight", "out", "in")
    heads = found.number("num_heads") or 1
    kv_heads = found.number("num_kv_heads") or heads
    if 1 < kv_heads < heads and "query_key_value" in found.names["qkv.weight"]:
        expected = (
            f"{heads} or 1: with other numbers of kv heads, rows under query_key_value may be grouped by kv head (Falcon-40B, Falcon 2)"
        )
        expected += ", which is not read here. If they are [q; k; v], name the tensors qkv_proj and o_proj"
        raise InvalidRequest.where(field_pointer("num_kv_heads"), expected, str(kv_heads))
    width, rest = divmod(packed.shape[0], heads + 2 * kv_heads)
    if rest:
        raise found.misfit("qkv.weight", f"a multiple of {heads + 2 * kv_heads} rows, one head_dim for each head of q, k and v")
    cuts = [heads * width, (heads + kv_heads) * width]
    weights = _named(np.split(packed, cuts), "weight") | _output(found)
    if found.has("qkv.bias"):
        if found.get("qkv.bias", "n").shape[0] != packed.shape[0]:
            raise found.misfit("qkv.bias", f"shape [{packed.shape[0]}]")
        weights |= _named(np.split(found.arrays["qkv.bias"], cuts), "bias")
    return Read(weights, rope_told(found))


def _per_head(found: Found) -> Weights:
    """Rows [heads, 3, head_dim]: without the head count they cannot be cut."""
    packed = found.get("qkv.weight", "out", "in")
    heads = found.number("num_heads")
    if heads is None:
        raise InvalidRequest.where(field_pointer("num_heads"), "the number of heads, by which the rows are cut", "nothing")
    if packed.shape[0] % (3 * heads):
        raise found.misfit("qkv.weight", f"a multiple of {3 * heads} rows, since num_heads is {heads}")
    weights = _named(_heads_of(packed, heads), "weight") | _output(found)
    if found.has("qkv.bias"):
        if found.get("qkv.bias", "n").shape[0] != packed.shape[0]:
            raise found.misfit("qkv.bias", f"shape [{packed.shape[0]}]")
        weights |= _named(_heads_of(found.arrays["qkv.bias"], heads), "bias")
    return weights


def _heads_of(packed: Array, heads: int) -> list[Array]:
    cut = packed.reshape(heads, 3, -1, *packed.shape[1:])
    return [cut[:, i].reshape(-1, *packed.shape[1:]) for i in range(3)]


def bloom(found: Found) -> Read:
    return Read(_per_head(found), assumed={"alibi": True})


def neox(found: Found) -> Read:
    given, told = found.given.get("rope"), rope_told(found)
    if isinstance(given, Mapping) and given.get("dims") is None and not told:
        raise InvalidRequest.where(field_pointer("rope", "dims"), "how many dims are rotated, rotary_pct x head_dim", "nothing")
    return Read(_per_head(found), told, {"rope": {"interleaved": False}})


def _named(three: list[Array], kind: str) -> Weights:
    return {f"{name}.{kind}": array for name, array in zip(("query", "key", "value"), three, strict=True)}


def _cut(found: Found, part: str, pieces: int) -> list[Array]:
    bias = found.get(part, "n")
    if bias.shape[0] % pieces:
        raise found.misfit(part, f"a multiple of {pieces} numbers")
    return np.split(bias, pieces)


def _torch_biases(found: Found, width: int) -> Weights:
    if not found.has("qkv.bias"):
        return {}
    if found.get("qkv.bias", "3*embed_dim").shape[0] != 3 * width:
        raise found.misfit("qkv.bias", f"shape [{3 * width}], packed even where the weights are not")
    return _named(np.split(found.arrays["qkv.bias"], 3), "bias")


def _output(found: Found) -> Weights:
    weights = {"output.weight": found.get("output.weight", "out", "in")}
    return weights | ({"output.bias": found.get("output.bias", "n")} if found.has("output.bias") else {})


def _conv_output(found: Found) -> Weights:
    return {"output.weight": found.get("output.weight", "in", "out").T, "output.bias": found.get("output.bias", "n")}


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

FORMS = (
    Layout("torch_mha", {"in_proj_weight": "qkv.weight"} | TORCH_OUT, torch_packed, optional=TORCH_BIASES, refused=TORCH_REFUSED),
    Layout("torch_mha", TORCH_SEPARATE | TORCH_OUT, torch_separate, optional=TORCH_BIASES, refused=TORCH_REFUSED),
    Layout("gpt2", _fused_names("c_attn", "c_proj"), gpt2, aside=MASKS),
    Layout("gpt2", CROSS, gpt2_cross, aside=MASKS),
    Layout("vit", _fused_names("qkv", "proj"), rows, optional=EITHER_BIAS),
    Layout("bloom", QKV, bloom, told_under=()),
    Layout("neox", QKV | FREQUENCIES, neox, optional=(("qkv.bias", "output.bias"), ("inv_freq",)), aside=MASKS, needs=ROPE, told_under=()),
    *(
        Layout("fused", _fused_names(*names) | FREQUENCIES, rows, optional=(*EITHER_BIAS, ("inv_freq",)), aside=MASKS, told_under=())
        for names in SPELLED
    ),
)
