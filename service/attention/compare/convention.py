"""How someone's attention wants to be made and called: what can be told about it, and the names by which the rest is known.

Names are known where their meaning is beyond doubt. Where libraries disagree (does true in a mask mean "may attend"? is W applied as x @ W?
how is a packed matrix cut?) nothing is guessed: a field of `Convention` says it, or a ValueError asks for that field.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from service.attention.compare.weight_names import BARE, parse_name
from service.spec import PROJECTIONS

Polarity = Literal["attend", "block", "add"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


HEADS = _names("num_heads n_heads heads h n_head nhead nheads num_attention_heads head_num")

# What a call is made of: role -> the names that parameters have for it, compared in lower case.
ROLES: dict[str, frozenset[str]] = {
    "query": _names("query queries q x x_q xq input inputs inputs_q input_q hidden_states query_states embeddings"),
    "key": _names("key keys k x_k xk inputs_k input_k key_states context memory encoder_hidden_states key_value_states kv x_kv"),
    "value": _names("value values v x_v xv inputs_v input_v value_states"),
    "mask": _names("mask attn_mask attention_mask attend_mask block_mask src_mask attn_bias"),
    "padding": _names("key_padding_mask padding_mask pad_mask key_mask"),
    "lengths": _names("valid_lens valid_len valid_lengths valid_length lengths lens seq_lens seq_lengths"),
    "causal": _names("causal is_causal use_causal_mask"),
    "weights_too": _names(
        "need_weights return_weights return_attn return_attention return_attn_weights return_attention_weights "
        "return_attention_scores output_attentions"
    ),
    "heads": HEADS,
    "average": _names("average_attn_weights"),
}

# What a constructor is made of, and what a function of matrices is told.
WIDTH = _names(
    "embed_dim d_model num_hiddens hidden_size hidden_dim dim embed_size emb_dim emb_size embedding_dim model_dim dim_model n_embd d_in "
    "d_out input_dim output_dim in_dim out_dim query_size key_size value_size"
)
HEAD_WIDTH = _names("head_dim d_k d_v d_q d_head dim_head head_size")
LENGTH = _names("context_length block_size max_len max_length max_seq_len max_seq_length seq_len ctx_len")
DROPOUT = _names("dropout dropout_p dropout_rate attn_dropout attn_drop drop p")


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """Everything that may be told about a target; each field is also an option of `compare` and `assert_agrees`."""

    mask_means: Polarity | None = None  # true = may attend, true = blocked, or a float mask that is added
    mask_shape: Literal["q,k", "b,k", "b,q,k", "b,1,q,k", "b,h,q,k"] = "q,k"
    mask_dtype: Literal["bool", "int", "float"] = "bool"  # of a mask that is not added
    padding_means: Polarity | None = None  # the same of a separate mask per key, [b, k]
    arguments: Mapping[str, str] = field(default_factory=dict)  # parameter -> role, where its name does not tell
    method: str | None = None  # to call; else __call__, forward or call
    batched: bool = True  # false: it takes [n, d_model]
    batch_first: bool | None = None  # false: it takes [n, b, d_model]; else what its attribute batch_first says, or true
    causal: bool = False  # true: it is causal without being asked
    average_weights: bool = False  # true: the weights it returns are averaged over the heads
    layout: Literal["b,h,n,d", "b,n,h,d", "b,n,d"] = "b,h,n,d"  # of a function's query, key and value
    framework: Literal["torch", "numpy"] | None = None  # of a function
    dtype: str | None = None  # of all but instances of modules; else float32 for torch and float64 for NumPy
    device: str | None = None  # of torch, of all but instances
    orientation: Literal["in,out", "out,in"] | None = None  # of a bare matrix: x @ W or x @ W.T; NumPy classes default to x @ W
    fused: Literal["q,k,v", "per_head"] | None = None  # rows of one matrix for all three: [3, h, d] or [h, 3, d]
    weights: Mapping[str, Any] | None = None  # under canonical names [out, in], instead of reading them
    d_model: int = 12  # of what is constructed here
    num_heads: int | None = None  # of an instance that does not tell; 3 for what is constructed here
    construct: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the constructor
    tolerance: float | None = None  # relative, instead of the dtype's own


def find_roles(signature: inspect.Signature, arguments: Mapping[str, str]) -> dict[str, str]:
    """Role -> parameter. A matrix or bias that is an argument (`W_q`) has its canonical name as its role.

    ValueError: a required parameter whose name tells nothing, two for one role, no query.
    """
    roles: dict[str, str] = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        role = arguments.get(name) or next((role for role, names in ROLES.items() if name.lower() in names), None)
        if role is None and name.lower() not in BARE and (found := parse_name(name)) and found[0] in PROJECTIONS:
            role = ".".join(found)
        if role is None and parameter.default is parameter.empty:
            raise ValueError(f"cannot tell what parameter {name!r} means: pass arguments={{{name!r}: …}}, one of {', '.join(ROLES)}")
        if role in roles:
            raise ValueError(f"cannot tell which is the {role}, {roles[role]!r} or {name!r}: pass arguments={{{name!r}: …}}")
        if role is not None:
            roles[role] = name
    if strange := {*arguments} - {*signature.parameters} or {*arguments.values()} - {*ROLES}:
        raise ValueError(f"expected arguments to map {', '.join(signature.parameters)} to {', '.join(ROLES)}, got {sorted(strange)}")
    if "query" not in roles:
        raise ValueError(f"cannot tell which parameter of ({', '.join(signature.parameters)}) is the query: pass arguments={{…: 'query'}}")
    return roles


def mask_polarity(convention: Convention, name: str, padding: bool = False) -> Polarity:
    """What true means in the mask `name`. ValueError where neither its name nor the convention tells."""
    told = convention.padding_means if padding else convention.mask_means
    named: dict[str, Polarity] = {"attend_mask": "attend", "block_mask": "block"}
    if told is None and name not in named:
        option = "padding_means" if padding else "mask_means"
        raise ValueError(f'cannot tell what true means in {name!r}: pass {option}="attend", "block" or "add" (libraries disagree)')
    return told or named[name]


def constructor_arguments(signature: inspect.Signature, convention: Convention) -> dict[str, Any]:
    """What to construct a class with: d_model and heads under the names it has for them, no dropout, batch first.

    ValueError: a required parameter whose name tells nothing.
    """
    heads = convention.num_heads or 3
    known = {
        **dict.fromkeys(WIDTH, convention.d_model),
        **dict.fromkeys(HEADS, heads),
        **dict.fromkeys(HEAD_WIDTH, convention.d_model // heads),
        **dict.fromkeys(LENGTH, 16),
        **dict.fromkeys(DROPOUT, 0.0),
        "batch_first": convention.batch_first is not False,
    }
    given: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if name in convention.construct or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name.lower() in known and parameter.default is not None:
            given[name] = known[name.lower()]
        elif parameter.default is parameter.empty:
            raise ValueError(f"cannot tell what to give {name!r}: pass construct={{{name!r}: …}}, or an instance")
    return given | dict(convention.construct)
