"""The names that people give to parameters of calls, parameters of constructors, and weights.

A name is used where its meaning is beyond doubt. Otherwise a ValueError names the option of `Convention` that decides.
"""

import inspect
import re
from collections.abc import Mapping
from typing import Any

from service.attention.compare.convention import Convention, Polarity
from service.spec import LAMBDAS, LayerSpec
from service.spec_parts import PROJECTIONS


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Name -> what it means, from meaning -> names."""
    return {name: meaning for meaning, names in table.items() for name in names.split()}


HEADS = "num_heads n_heads heads h n_head nhead nheads num_attention_heads head_num"
CALL = {  # role of a parameter of the call -> its usual names, in lower case
    "query": "query queries q x x_q xq input inputs inputs_q input_q hidden_states query_states embeddings",
    "key": "key keys k x_k xk inputs_k input_k key_states context memory encoder_hidden_states key_value_states kv x_kv",
    "value": "value values v x_v xv inputs_v input_v value_states",
    "mask": "mask attn_mask attention_mask attend_mask block_mask src_mask attn_bias",
    "padding": "key_padding_mask padding_mask pad_mask key_mask",
    "lengths": "valid_lens valid_len valid_lengths valid_length lengths lens seq_lens seq_lengths",
    "segments": "segments segment_ids segment_id document_ids document_id doc_ids sequence_ids seq_ids",
    "boundaries": "cu_seqlens cu_seq_lens",
    "positions": "position_ids positions",
    "causal": "causal is_causal use_causal_mask",
    "return_weights": "need_weights return_weights return_attn return_attention return_attn_weights return_attention_weights "
    "return_attention_scores output_attentions",
    "heads": HEADS,
    "average": "average_attn_weights",
}
CONSTRUCTOR = {
    "d_model": "embed_dim d_model num_hiddens hidden_size hidden_dim dim embed_size emb_dim emb_size embedding_dim model_dim dim_model "
    "n_embd d_in d_out input_dim output_dim in_dim out_dim query_size key_size value_size",
    "num_heads": HEADS,
    "num_kv_heads": "num_kv_heads n_kv_heads num_key_value_heads kv_heads",
    "head_dim": "head_dim d_k d_q d_head dim_head head_size",
    "length": "context_length block_size max_len max_length max_seq_len max_seq_length seq_len ctx_len",
    "dropout": "dropout dropout_p dropout_rate attn_dropout attn_drop drop p",
    "batch_first": "batch_first",
    "theta": "rope_theta theta",
    "query_rank": "q_lora_rank",
    "key_value_rank": "kv_lora_rank",
    "rope_key_dim": "qk_rope_head_dim",
    "own_key_dim": "qk_nope_head_dim",
    "value_head_dim": "v_head_dim d_v",
}
WEIGHTS = {  # besides q_proj, W_q, wq, w_qs, query, queries, to_q, q_lin, linear_q, fc_out, b_o, bias_q, qkv_proj, …
    "in_proj": "in_proj c_attn",  # query, key and value in this order
    "output": "c_proj dense proj projection fc unify_heads combine_heads",
    "query_norm": "query_norm q_norm query_layernorm q_layernorm",
    "key_norm": "key_norm k_norm key_layernorm k_layernorm",
    "gate": "gate gate_proj g_proj",
    "query": "q_b_proj",
    "query_down": "query_down q_a_proj",
    "query_down_norm": "query_down_norm q_a_layernorm",
    "key_value_down": "key_value_down",
    "key_value_down_norm": "key_value_down_norm kv_a_layernorm",
    "rope_key": "rope_key",
    "kv_a": "kv_a_proj_with_mqa",  # DeepSeek's: key_value_down and rope_key
    "kv_b": "kv_b_proj",  # DeepSeek's: key and value
    "head_norm": "head_norm subln",
    "relative_bias": "relative_bias relative_attention_bias",
} | {name: name for name in ("sinks", *LAMBDAS, "grid_bias", "grid_rows", "grid_columns")}
_CALL, _CONSTRUCTOR, _WEIGHTS = _by_name(CALL), _by_name(CONSTRUCTOR), _by_name(WEIGHTS)
_PROJECTION = re.compile(
    r"(?:(?:w|b|weight|bias|linear|lin|fc|to)_?)?"
    r"(?P<role>qkv|query_key_value|queries|query|q|keys?|k|values?|v|output|out|o)s?"
    r"(?P<tail>(?:_?(?:projection|proj|linear|lin|layer|dense|weights?|bias|kernel|matrix|w|b))*)"
)
_ROLES = {"query_key_value": "qkv"} | _by_name({"query": "q queries", "key": "k keys", "value": "v values", "output": "o out"})
_ANNOTATED = re.compile(r"linears\.([0-3])\.(weight|bias)")  # The Annotated Transformer: query, key, value, output in a list
BARE = frozenset([*PROJECTIONS, *_ROLES]) - {"query_key_value"}  # these may also be inputs
UNTYPED = ("relative_bias", "sinks", *LAMBDAS, "grid_bias", "grid_rows", "grid_columns")  # weights without a kind
WEIGHT_ROLES = ("qkv", *PROJECTIONS, *WEIGHTS)
POSITIONS = 32  # the longest sequence that a class is constructed for


def parse_weight_name(path: str) -> str | None:
    """The canonical name of the weight at this path, such as "query.bias"; None for an unknown name.

    Instead of a projection, "qkv", "in_proj", "kv_a" and "kv_b" are several in one tensor.
    """
    if listed := _ANNOTATED.search(path):
        return f"{PROJECTIONS[int(listed[1])]}.{listed[2]}"
    parts = [part for part in path.lower().split(".") if not part.isdigit()]
    name = "_".join(parts[-2:]) if parts[-1] in ("weight", "bias", "kernel") else parts[-1]
    kind = "bias" if name.endswith("bias") else "weight"
    role = _WEIGHTS.get(name) or _WEIGHTS.get(re.sub("_?(weight|bias|kernel)$", "", name))
    if role is None:
        if (match := _PROJECTION.fullmatch(name)) is None:
            return None
        role = _ROLES.get(match["role"], match["role"])
        if name.startswith("b") or "bias" in match["tail"] or match["tail"].endswith("_b"):
            kind = "bias"
    return role if role in UNTYPED else f"{role}.{kind}"


def find_roles(signature: inspect.Signature, arguments: Mapping[str, str]) -> dict[str, str]:
    """Role -> name of the parameter. The role of a parameter such as `W_q` is the canonical name of that weight.

    ValueError: a required parameter of unknown name, two for one role, no query.
    """
    weights = [f"{name}.{kind}" for name in (*PROJECTIONS, *WEIGHTS) for kind in ("weight", "bias")] + [*UNTYPED]
    roles: dict[str, str] = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        role = arguments.get(name) or _CALL.get(name.lower())
        if role is None and name.lower() not in BARE and (weight := parse_weight_name(name)) in weights:
            role = weight
        if role is None and parameter.default is parameter.empty:
            known = f"one of {', '.join(CALL)}, or a weight such as query.weight"
            raise ValueError(f'ambiguous: the meaning of parameter {name!r}; pass arguments={{"{name}": …}}, {known}')
        if role in roles:
            raise ValueError(f'ambiguous: which is the {role}, {roles[role]!r} or {name!r}; pass arguments={{"{name}": …}}')
        if role is not None:
            roles[role] = name
    if strange := {*arguments} - {*signature.parameters} or {*arguments.values()} - {*CALL, *weights}:
        known = f"{', '.join(CALL)} or a weight such as query.weight"
        raise ValueError(f"expected arguments to map {', '.join(signature.parameters)} to {known}, got {sorted(strange)}")
    if "query" not in roles:
        names = ", ".join(signature.parameters)
        raise ValueError(f'ambiguous: which parameter of ({names}) is the query; pass arguments={{…: "query"}}')
    return roles


def mask_polarity(convention: Convention, name: str, padding: bool = False) -> Polarity:
    """The meaning of true in the mask `name`. ValueError: neither its name nor the convention states it."""
    means = convention.padding_means if padding else convention.mask_means
    named: dict[str, Polarity] = {"attend_mask": "attend", "block_mask": "block"}
    if means is None and name not in named:
        option = "padding_means" if padding else "mask_means"
        raise ValueError(f'ambiguous: the meaning of true in {name!r}; pass {option}="attend", "block" or "add" (libraries disagree)')
    return means or named[name]


def constructor_arguments(signature: inspect.Signature, convention: Convention, spec: LayerSpec) -> dict[str, Any]:
    """Arguments for a class: the sizes of the spec under its names for them, no dropout, batch first.

    ValueError: a required parameter of unknown name.
    """
    sizes: dict[str, Any] = {name: getattr(spec, name) for name in ("d_model", "num_heads", "num_kv_heads", "head_dim", "value_head_dim")}
    sizes |= {"length": POSITIONS, "dropout": 0.0, "batch_first": convention.batch_first is not False}
    if spec.rope:
        sizes["theta"] = spec.rope.theta
    if spec.latent:
        sizes |= {name: getattr(spec.latent, name) for name in ("query_rank", "key_value_rank", "rope_key_dim")}
        sizes["own_key_dim"] = spec.head_dim - spec.latent.rope_key_dim
    given: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if name in convention.construct or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if (meaning := _CONSTRUCTOR.get(name.lower())) in sizes and parameter.default is not None:
            given[name] = sizes[meaning]
        elif parameter.default is parameter.empty:
            raise ValueError(f"ambiguous: the value of constructor parameter {name!r}; pass construct={{{name!r}: …}}, or an instance")
    return given | dict(convention.construct)
