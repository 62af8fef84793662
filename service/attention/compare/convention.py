"""How a candidate is constructed and called: the options of `Convention`, and the names that people give to parameters and weights.

A name is used where its meaning is beyond doubt. Where libraries disagree (does true in a mask mean "may attend"? is W applied as x @ W?
how is a packed matrix split?) an option of `Convention` decides, and without it a ValueError asks for that option.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from service.spec import PROJECTIONS, DType

Polarity = Literal["attend", "block", "add"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


HEADS = _names("num_heads n_heads heads h n_head nhead nheads num_attention_heads head_num")

# Role of a parameter of the call -> its usual names, in lower case.
ROLES: dict[str, frozenset[str]] = {
    "query": _names("query queries q x x_q xq input inputs inputs_q input_q hidden_states query_states embeddings"),
    "key": _names("key keys k x_k xk inputs_k input_k key_states context memory encoder_hidden_states key_value_states kv x_kv"),
    "value": _names("value values v x_v xv inputs_v input_v value_states"),
    "mask": _names("mask attn_mask attention_mask attend_mask block_mask src_mask attn_bias"),
    "padding": _names("key_padding_mask padding_mask pad_mask key_mask"),
    "lengths": _names("valid_lens valid_len valid_lengths valid_length lengths lens seq_lens seq_lengths"),
    "causal": _names("causal is_causal use_causal_mask"),
    "return_weights": _names(
        "need_weights return_weights return_attn return_attention return_attn_weights return_attention_weights "
        "return_attention_scores output_attentions"
    ),
    "heads": HEADS,
    "average": _names("average_attn_weights"),
}

# Usual names of a constructor's parameters.
WIDTH = _names(
    "embed_dim d_model num_hiddens hidden_size hidden_dim dim embed_size emb_dim emb_size embedding_dim model_dim dim_model n_embd d_in "
    "d_out input_dim output_dim in_dim out_dim query_size key_size value_size"
)
HEAD_WIDTH = _names("head_dim d_k d_v d_q d_head dim_head head_size")
LENGTH = _names("context_length block_size max_len max_length max_seq_len max_seq_length seq_len ctx_len")
DROPOUT = _names("dropout dropout_p dropout_rate attn_dropout attn_drop drop p")

# q_proj, W_q, wq, w_qs, query, queries, to_q, q_lin, linear_q, fc_out, b_o, bias_q, qkv_proj, …
_WEIGHT_NAME = re.compile(
    r"(?:(?P<head>w|b|weight|bias|linear|lin|fc|to)_?)?"
    r"(?P<role>qkv|query_key_value|queries|query|q|keys?|k|values?|v|output|out|o)s?"
    r"(?P<tail>(?:_?(?:projection|proj|linear|lin|layer|dense|weights?|bias|kernel|matrix|w|b))*)"
)
_OTHER_WEIGHT_NAMES = {"in_proj": "in_proj", "c_attn": "in_proj", "c_proj": "output"} | dict.fromkeys(
    ("dense", "proj", "projection", "fc", "unify_heads", "combine_heads"), "output"
)
_ROLES = {"q": "query", "queries": "query", "k": "key", "keys": "key", "v": "value", "values": "value", "o": "output", "out": "output"}
_ANNOTATED = re.compile(r"linears\.([0-3])\.(weight|bias)")  # The Annotated Transformer: query, key, value, output in a list
BARE = frozenset([*_ROLES, *PROJECTIONS])  # these may also be inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """The conventions of a candidate; each field is also an option of `compare`, `assert_agrees` and `attend check --with`."""

    mask_means: Annotated[Polarity | None, "true in a mask: may attend, is blocked, or is added to the scores (0 and -inf)"] = None
    mask_shape: Annotated[Literal["q,k", "b,k", "b,q,k", "b,1,q,k", "b,h,q,k"], "axes of a mask"] = "q,k"
    mask_dtype: Annotated[Literal["bool", "int", "float"], "of a mask that is not added"] = "bool"
    padding_means: Annotated[Polarity | None, "the same as mask_means, of a separate mask over the keys, [b, k]"] = None
    arguments: Annotated[Mapping[str, str], 'what parameters are: {"x": "query", "A": "query.weight", …}'] = field(default_factory=dict)
    method: Annotated[str | None, "the method to call; by default the object itself, forward or call"] = None
    batched: Annotated[bool, "false: inputs are [n, d_model]"] = True
    batch_first: Annotated[bool | None, "false: inputs are [n, b, d_model]; by default the attribute batch_first, or true"] = None
    causal: Annotated[bool, "true: it is always causal"] = False
    average_weights: Annotated[bool, "true: the returned weights are averaged over the heads"] = False
    layout: Annotated[Literal["b,h,n,d", "b,n,h,d", "b,n,d"], "axes of the query, key and value of a function"] = "b,h,n,d"
    framework: Annotated[Literal["torch", "numpy"] | None, "of a function; by default found by calling it"] = None
    dtype: Annotated[DType | None, "not for a module instance; by default float32 in torch, float64 in NumPy"] = None
    device: Annotated[str | None, "of torch, such as cuda; not for a module instance"] = None
    orientation: Annotated[
        Literal["in,out", "out,in"] | None,
        "of a matrix that is not in a layer: applied as x @ W, or as x @ W.T; NumPy classes: in,out by default",
    ] = None
    fused: Annotated[Literal["q,k,v", "per_head"] | None, "rows of one matrix for query, key and value: [3, h, d], or [h, 3, d]"] = None
    weights: Annotated[
        Mapping[str, Any] | None,
        'names of the weights, if unknown: {"query": "layers.0", "output.bias": "b", …}; in Python also arrays [out, in]',
    ] = None
    d_model: Annotated[int, "of a class, which is constructed"] = 12
    num_heads: Annotated[int | None, "of an instance without such an attribute; a class is constructed with 3 by default"] = None
    construct: Annotated[Mapping[str, Any], 'further arguments of the constructor: {"max_len": 64}'] = field(default_factory=dict)
    tolerance: Annotated[float | None, "relative; by default by dtype"] = None

    @property
    def names_weights(self) -> bool:
        """Whether `weights` has names of the candidate's tensors, not arrays."""
        return any(isinstance(x, str) for x in (self.weights or {}).values())


def make_convention(options: Mapping[str, Any]) -> Convention:
    """The convention with these options. TypeError: no such option. ValueError: not one of its values."""
    known = _annotations()
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"expected an option among {', '.join(known)}, got {name!r}")
        if not _fits(value, known[name].__origin__):
            raise ValueError(f"expected {name} to be {' or '.join(_values(known[name].__origin__))}, got {value!r}")
    return Convention(**options)


def option_table() -> list[tuple[str, list[str], str]]:
    """Name, values and meaning of each option."""
    return [(name, _values(option.__origin__), option.__metadata__[0]) for name, option in _annotations().items()]


def _annotations() -> dict[str, Any]:
    """Option -> its `Annotated` type."""
    return {option.name: option.type for option in fields(Convention)}


def _values(annotation: Any) -> list[str]:
    """The values of an option: literals, or the kind of value."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return [value for part in get_args(annotation) if part is not NoneType for value in _values(part)]
    kinds = {bool: ["true", "false"], int: ["an integer"], float: ["a number"], str: ["a name"]}
    return kinds.get(annotation, ["a JSON object"])


def _fits(value: Any, annotation: Any) -> bool:
    """Whether the value is of that type."""
    if get_origin(annotation) is Literal:
        return value in get_args(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(annotation))
    return isinstance(value, (float, int) if annotation is float else get_origin(annotation) or annotation)


def find_roles(signature: inspect.Signature, arguments: Mapping[str, str]) -> dict[str, str]:
    """Role -> name of the parameter. The role of a parameter such as `W_q` is the canonical name of that weight.

    ValueError: a required parameter of unknown name, two for one role, no query.
    """
    roles: dict[str, str] = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        role = arguments.get(name) or next((role for role, names in ROLES.items() if name.lower() in names), None)
        if role is None and name.lower() not in BARE and (found := parse_weight_name(name)) and found[0] in PROJECTIONS:
            role = ".".join(found)
        if role is None and parameter.default is parameter.empty:
            roles_known = f"one of {', '.join(ROLES)}, or a weight such as query.weight"
            raise ValueError(f'ambiguous: the meaning of parameter {name!r}; pass arguments={{"{name}": …}}, {roles_known}')
        if role in roles:
            raise ValueError(f'ambiguous: which is the {role}, {roles[role]!r} or {name!r}; pass arguments={{"{name}": …}}')
        if role is not None:
            roles[role] = name
    weights = [f"{name}.{kind}" for name in PROJECTIONS for kind in ("weight", "bias")]
    if strange := {*arguments} - {*signature.parameters} or {*arguments.values()} - {*ROLES, *weights}:
        known = ", ".join([*ROLES, *weights])
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


def constructor_arguments(signature: inspect.Signature, convention: Convention) -> dict[str, Any]:
    """Arguments for a class: d_model and heads under its names for them, no dropout, batch first.

    ValueError: a required parameter of unknown name.
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
            raise ValueError(f"ambiguous: the value of constructor parameter {name!r}; pass construct={{{name!r}: …}}, or an instance")
    return given | dict(convention.construct)


def parse_weight_name(path: str) -> tuple[str, str] | None:
    """(projection, "weight" or "bias") of the weight at this path, such as ("query", "bias"); None for an unknown name.

    Instead of a projection, "qkv" is all three in one tensor, and "in_proj" the same in the order query, key, value.
    """
    if listed := _ANNOTATED.search(path):
        return PROJECTIONS[int(listed[1])], listed[2]
    parts = [part for part in path.lower().split(".") if not part.isdigit()]
    name = "_".join(parts[-2:]) if parts[-1] in ("weight", "bias", "kernel") else parts[-1]
    kind = "bias" if name.endswith("bias") else "weight"
    if other := _OTHER_WEIGHT_NAMES.get(re.sub("_?(weight|bias|kernel)$", "", name)):
        return other, kind
    match = _WEIGHT_NAME.fullmatch(name)
    if match is None:
        return None
    if match["head"] in ("b", "bias") or "bias" in match["tail"] or match["tail"].endswith("_b"):
        kind = "bias"
    role = "qkv" if match["role"] == "query_key_value" else match["role"]
    return _ROLES.get(role, role), kind
