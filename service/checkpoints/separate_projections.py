"""Layouts with four separate matrices [out, in], as torch's Linear has them: BERT's family, ViT, BART, and the decoders with RoPE.

Where tensors cannot tell, the spec must: the head count everywhere, and for decoders `rope`, which is an object or null. Llama's names
stand in files of other models too, which rotate pairs (Cohere, GLM-4, Llama 4) or part of a head (GLM-4, Nemotron), so there `rope` must
say `theta` and `interleaved`, and `dims` where it is not the whole head. Assumed where the spec is silent: halves (`interleaved` false) for
`gemma3`; pairs (`interleaved` true) for `meta_llama`, Llama before Hugging Face permuted its rows; eps 1e-6 of norms on queries and keys.
Softcap, window, theta and a scale other than 1/sqrt(head_dim) are in no tensor: what the model's config has must be in the spec.
"""

from collections.abc import Mapping

import numpy as np

from service.checkpoints.layout import ALL_BIASES, QKV_BIASES, Fields, Found, Layout, Read, as_linear, linear, linear_names
from service.checkpoints.problems import field_pointer
from service.errors import InvalidRequest

ROPE = {"rope": 'the config\'s rotary embedding, such as {"theta": 10000}, or null for none'}
LLAMA_ROPE = (
    "the rotary embedding, since models with others share Llama's names: "
    '{"theta": 10000, "interleaved": false} as Llama, Mistral and Qwen have it, "interleaved": true for pairs (Cohere, GLM-4), '
    'with "dims" where only part of a head is rotated (GLM-4, Nemotron); null for none'
)
NORMS = {"q_norm.weight": "query_norm.weight", "k_norm.weight": "key_norm.weight"}
FREQUENCIES = {"rotary_emb.inv_freq": "inv_freq"}  # a buffer of old checkpoints: [dims / 2]


def rope_told(found: Found) -> Fields:
    """Checkpoints that keep the frequencies tell how many dims of a head are rotated; theta and scaling the spec must still say."""
    if not found.has("inv_freq"):
        return {}
    if "rope" not in found.given:
        raise InvalidRequest.where(field_pointer("rope"), ROPE["rope"], "nothing")
    return {"rope": {"dims": 2 * len(found.get("inv_freq", "n"))}}


def as_llama(found: Found) -> Read:
    """As `half_split`, but that it is halves must be said: files of other models have the same names."""
    given = found.given.get("rope")
    if isinstance(given, Mapping):
        for name in ("theta", "interleaved"):
            if given.get(name) is None:
                raise InvalidRequest.where(field_pointer("rope", name), LLAMA_ROPE, "nothing")
    return half_split(found)


def half_split(found: Found) -> Read:
    """RoPE on halves; norms, if any, before it, with weights as they are."""
    return Read(as_linear(found), rope_told(found), {"rope": {"interleaved": False}, "qk_norm": {"kind": "rms", "eps": 1e-6}})


def interleaved(found: Found) -> Read:
    return Read(as_linear(found), rope_told(found), {"rope": {"interleaved": True}})


def one_plus(found: Found) -> Read:
    """As `half_split`, but Gemma keeps the norms' weights less 1; added in float32, as its own code does."""
    read = half_split(found)
    norms = {name: read.weights[name].astype(np.float32) + np.float32(1) for name in NORMS.values()}
    return Read(read.weights | norms, read.told, read.assumed)


PROJ = linear_names("q_proj", "k_proj", "v_proj", "o_proj")
BERT_SELF = linear_names("self.query", "self.key", "self.value", "output.dense")
VIT_FILE = linear_names("attention.query", "attention.key", "attention.value", "output.dense")
DISTILBERT = linear_names("q_lin", "k_lin", "v_lin", "out_lin")
BART = linear_names("q_proj", "k_proj", "v_proj", "out_proj")
META = linear_names("wq", "wk", "wv", "wo", biases="")

# Besides the four matrices: all biases (attention_bias) or those of q, k and v alone (Qwen2), and sinks.
LLAMA_OPTIONS = (QKV_BIASES, ("output.bias",), ("sinks",), ("inv_freq",))
LLAMA = PROJ | {"sinks": "sinks"} | FREQUENCIES

FORMS = (
    Layout("bert", BERT_SELF, linear, aside={"output.LayerNorm.*": None}),
    Layout("distilbert", DISTILBERT, linear),
    Layout("vit", VIT_FILE, linear, optional=(QKV_BIASES,)),
    Layout("vit", PROJ, linear, optional=(QKV_BIASES,), told_under=("attention",)),
    Layout(
        "bart",
        BART,
        linear,
        optional=(("query.bias", "value.bias", "output.bias"), ("key.bias",)),
        told_under=("self_attn", "encoder_attn"),
    ),
    Layout("llama", LLAMA, as_llama, optional=LLAMA_OPTIONS, needs={"rope": LLAMA_ROPE}, told_under=("self_attn",)),
    Layout(
        "llama",
        LLAMA | NORMS,
        as_llama,
        optional=LLAMA_OPTIONS,
        needs={"rope": LLAMA_ROPE},
        told_under=("self_attn",),
        not_beside="pre_feedforward_layernorm.weight",  # Gemma 3 has it, and means its norms otherwise
    ),
    Layout("gemma3", PROJ | NORMS, one_plus, optional=(ALL_BIASES,), needs=ROPE, told_under=()),
    Layout("meta_llama", META | FREQUENCIES, interleaved, optional=(("inv_freq",),), needs=ROPE),
)
