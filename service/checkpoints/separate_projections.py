"""Layouts with four separate matrices: this service's own, textbooks, and transformers with torch's Linear; [out, in] by default.

* `attend`: canonical names and shapes.
* `d2l`: W_q, W_k, W_v, W_o; [out, in] as `.weight` (torch, MXNet), [in, out] as `/kernel` (Flax) or `/vars/0` (Keras' files). Keras'
  variable paths (`dense/kernel`, `dense_1/kernel`) do not tell the matrices apart and are not read.
* `mxnet`: GluonNLP's cells as `save_parameters` writes them. The output projection is the sibling `proj` of the attention. A decoder has
  `attention_cell_in` (self-attention) and `attention_cell_inter` (to the encoder).
* `numpy`: bare matrices [in, out], applied as x @ W.
* `llama`: other models use the same names but rotate pairs (Cohere, GLM-4, Llama 4) or part of a head (GLM-4, Nemotron), so the spec must
  have `rope` with `theta` and `interleaved`, and `dims` if not the whole head is rotated.
* `gemma3` defaults to RoPE on halves, `meta_llama` (before Hugging Face permuted its rows) to RoPE on pairs.
* `t5`: only the first block of each stack has the table of position biases; it is read for the other blocks too. Encoders are
  bidirectional, decoders are not; the name of the stack, or `relative_bias.bidirectional` of the spec, decides. Cross-attention has no
  table.

Defaults: eps 1e-6 of norms on queries and keys; T5's scale 1 and max_distance 128. Head count, softcap, window, theta and scale are in no
tensor: copy them from the model's config into the spec.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from service.checkpoints.layout import (
    ALL_BIASES,
    QKV_BIASES,
    Converted,
    Fields,
    LayerTensors,
    Layout,
    as_linear,
    kernels,
    linear,
    linear_names,
)
from service.checkpoints.refusals import field_pointer, shape_of, weight_pointer
from service.errors import InvalidRequest
from service.spec_parts import PROJECTIONS
from service.tensors import Array

ROPE = {"rope": 'the config\'s rotary embedding, such as {"theta": 10000}, or null for none'}
LLAMA_ROPE = (
    "the rotary embedding, since models with others share Llama's names: "
    '{"theta": 10000, "interleaved": false} as Llama, Mistral and Qwen have it, "interleaved": true for pairs (Cohere, GLM-4), '
    'with "dims" where only part of a head is rotated (GLM-4, Nemotron); null for none'
)
NORMS = {"q_norm.weight": "query_norm.weight", "k_norm.weight": "key_norm.weight"}
FREQUENCIES = {"rotary_emb.inv_freq": "inv_freq"}  # a buffer of old checkpoints: [dims / 2]
ROUTES = tuple(f"{name}.{kind}" for name in ("gate", "query_down", "key_value_down", "rope_key") for kind in ("weight", "bias"))
GRID = ("grid_bias", "grid_rows", "grid_columns")
RELATIVE = ("position_key.weight", "position_query.weight", "content_bias", "position_bias")
OTHERS = (*ROUTES, "query_down_norm.weight", "key_value_down_norm.weight", *GRID, *RELATIVE)
EXTRAS = {name: name for name in ("query_norm.weight", "key_norm.weight", "sinks", "relative_bias", *OTHERS)}
EITHER = (QKV_BIASES, ("output.bias",))
EXTRA_OPTIONS = (("query_norm.weight", "key_norm.weight"), ("sinks",), ("relative_bias",), *((part,) for part in OTHERS))
TABLE = "relative_attention_bias.weight"
CROSS = "EncDecAttention"


def canonical(tensors: LayerTensors) -> Converted:
    table = {"relative_bias": tensors.get("relative_bias", "buckets", "heads")} if tensors.has("relative_bias") else {}
    known = {"relative_bias": {"buckets": len(table["relative_bias"])}} if table else {}
    others = {part: tensors.arrays[part] for part in OTHERS if tensors.has(part)}
    return Converted(as_linear(tensors) | table | others, known)


def _d2l(weight: str, bias: str) -> dict[str, str]:
    return linear_names("W_q", "W_k", "W_v", "W_o", weight=weight, bias=bias)


def _gluon(cell: str, proj: str) -> Layout:
    """A GluonNLP cell has its attention in one child and the output projection in another."""
    names = linear_names(f"{cell}.proj_query", f"{cell}.proj_key", f"{cell}.proj_value", proj)
    return Layout("mxnet", names, linear, optional=EITHER, parent=cell)


def _bare(matrix: str, vector: str) -> dict[str, str]:
    letters = dict(zip(PROJECTIONS, "qkvo", strict=True))
    weights = {f"{matrix}{letter}": f"{name}.weight" for name, letter in letters.items()}
    return weights | {f"{vector}{letter}": f"{name}.bias" for name, letter in letters.items()}


def rope_dims(tensors: LayerTensors) -> Fields:
    """`rope.dims`, from a table of frequencies; {} without one. Raises InvalidRequest if the spec has no `rope` (theta and scaling)."""
    if not tensors.has("inv_freq"):
        return {}
    if "rope" not in tensors.given:
        raise InvalidRequest.where(field_pointer("rope"), ROPE["rope"], "nothing")
    return {"rope": {"dims": 2 * len(tensors.get("inv_freq", "n"))}}


def as_llama(tensors: LayerTensors) -> Converted:
    """As `half_split`; raises InvalidRequest if `rope` in the spec lacks `theta` or `interleaved`: other models have the same names."""
    given = tensors.given.get("rope")
    if isinstance(given, Mapping):
        for name in ("theta", "interleaved"):
            if given.get(name) is None:
                raise InvalidRequest.where(field_pointer("rope", name), LLAMA_ROPE, "nothing")
    return half_split(tensors)


def half_split(tensors: LayerTensors) -> Converted:
    """Default: RoPE on halves, after norms on queries and keys if there are any."""
    return Converted(as_linear(tensors), rope_dims(tensors), {"rope": {"interleaved": False}, "qk_norm": {"kind": "rms", "eps": 1e-6}})


def interleaved(tensors: LayerTensors) -> Converted:
    return Converted(as_linear(tensors), rope_dims(tensors), {"rope": {"interleaved": True}})


def one_plus(tensors: LayerTensors) -> Converted:
    """As `half_split`, for norm weights stored less 1: adds 1 in float32, as Gemma does."""
    converted = half_split(tensors)
    norms = {name: converted.weights[name].astype(np.float32) + np.float32(1) for name in NORMS.values()}
    return Converted(converted.weights | norms, converted.known, converted.assumed)


def t5(tensors: LayerTensors) -> Converted:
    weights = as_linear(tensors)
    known: Fields = {}
    stack = _first_block(tensors.stem)
    table_name, table = _table(tensors, stack)
    if table is not None:
        known["num_heads"] = table.shape[1]
    if _is_cross(tensors):
        return Converted(weights, known, {"scale": 1.0})
    if table is None:
        raise InvalidRequest.where(weight_pointer(table_name), "the stack's table of position biases, [buckets, heads]", "nothing")
    known["relative_bias"] = {"buckets": table.shape[0]}
    bias: dict[str, Any] = {"max_distance": 128, "bidirectional": _bidirectional(tensors)}
    return Converted(weights | {"relative_bias": table}, known, {"scale": 1.0, "relative_bias": bias})


def _is_cross(tensors: LayerTensors) -> bool:
    """Whether the layer is cross-attention: by its name, or by `relative_bias: null` in the spec if the layer is not in its checkpoint."""
    no_table = "relative_bias" in tensors.given and tensors.given["relative_bias"] is None and not tensors.has("relative_bias")
    return tensors.stem.endswith(CROSS) or no_table


def _first_block(stem: str) -> str:
    """The stem of the layer that has the table: decoder.block.3.layer.1.EncDecAttention -> decoder.block.0.layer.0.SelfAttention."""
    return re.sub(r"(^|\.)block\.\d+\.layer\.\d+\.\w+$", r"\1block.0.layer.0.SelfAttention", stem)


def _table(tensors: LayerTensors, stack: str) -> tuple[str, Array | None]:
    """(name, array) of the layer's table, or else of the table of the stack's first block."""
    name = f"{stack}.{TABLE}".lstrip(".")
    own = tensors.has("relative_bias")
    array = tensors.arrays["relative_bias"] if own else tensors.elsewhere(name)
    name = tensors.names["relative_bias"] if own else name
    if array is not None and array.ndim != 2:
        raise InvalidRequest.where(weight_pointer(name), "shape [buckets, heads]", shape_of(array))
    return name, array


def _bidirectional(tensors: LayerTensors) -> bool:
    stacks = [segment for segment in tensors.stem.split(".") if segment in ("encoder", "decoder")]
    if stacks:
        return stacks[-1] == "encoder"
    given = tensors.given.get("relative_bias")
    if not isinstance(given, Mapping) or type(given.get("bidirectional")) is not bool:
        raise InvalidRequest.where(field_pointer("relative_bias", "bidirectional"), "true for an encoder, false for a decoder", "nothing")
    return bool(given["bidirectional"])


PROJ = linear_names("q_proj", "k_proj", "v_proj", "o_proj")
BERT_SELF = linear_names("self.query", "self.key", "self.value", "output.dense")
VIT_FILE = linear_names("attention.query", "attention.key", "attention.value", "output.dense")
DISTILBERT = linear_names("q_lin", "k_lin", "v_lin", "out_lin")
BART = linear_names("q_proj", "k_proj", "v_proj", "out_proj")
META = linear_names("wq", "wk", "wv", "wo", biases="")

# Besides the four matrices: all biases (attention_bias) or those of q, k and v alone (Qwen2), and sinks.
LLAMA_OPTIONS = (QKV_BIASES, ("output.bias",), ("sinks",), ("inv_freq",))
LLAMA = PROJ | {"sinks": "sinks"} | FREQUENCIES
T5 = linear_names("q", "k", "v", "o", biases="")

LAYOUTS = (
    Layout("attend", linear_names(*PROJECTIONS) | EXTRAS, canonical, optional=(*((bias,) for bias in ALL_BIASES), *EXTRA_OPTIONS)),
    Layout("d2l", _d2l("weight", "bias"), linear, optional=(ALL_BIASES,)),
    Layout("d2l", _d2l("kernel", "bias"), kernels, optional=(ALL_BIASES,)),
    Layout("d2l", _d2l("vars.0", "vars.1"), kernels, optional=(ALL_BIASES,), ignored={"*seed_generator*": None}),
    _gluon("attention_cell", "proj"),
    _gluon("attention_cell_in", "proj_in"),
    _gluon("attention_cell_inter", "proj_inter"),
    *(Layout("numpy", _bare(*spelled), kernels, optional=EITHER) for spelled in (("W_", "b_"), ("W", "b"), ("w_", "b_"))),
    Layout("bert", BERT_SELF, linear, ignored={"output.LayerNorm.*": None}),
    Layout("distilbert", DISTILBERT, linear),
    Layout("vit", VIT_FILE, linear, optional=(QKV_BIASES,)),
    Layout("vit", PROJ, linear, optional=(QKV_BIASES,), identified_under=("attention",)),
    Layout(
        "bart",
        BART,
        linear,
        optional=(("query.bias", "value.bias", "output.bias"), ("key.bias",)),
        identified_under=("self_attn", "encoder_attn"),
    ),
    Layout("llama", LLAMA, as_llama, optional=LLAMA_OPTIONS, required_fields={"rope": LLAMA_ROPE}, identified_under=("self_attn",)),
    Layout(
        "llama",
        LLAMA | NORMS,
        as_llama,
        optional=LLAMA_OPTIONS,
        required_fields={"rope": LLAMA_ROPE},
        identified_under=("self_attn",),
        excluded_by="pre_feedforward_layernorm.weight",  # Gemma 3, which stores norm weights less 1
    ),
    Layout("gemma3", PROJ | NORMS, one_plus, optional=(ALL_BIASES,), required_fields=ROPE, identified_under=()),
    Layout("meta_llama", META | FREQUENCIES, interleaved, optional=(("inv_freq",),), required_fields=ROPE),
    Layout("t5", T5 | {TABLE: "relative_bias"}, t5, optional=(("relative_bias",),), identified_under=("SelfAttention",)),
    Layout("t5", T5, t5, ignored={TABLE: 2}, identified_under=(CROSS,)),  # old decoders have a table there that T5 itself ignores
)
