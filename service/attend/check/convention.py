"""What the parameters and weights of a candidate mean: by their usual names, or by the options of a `Convention`.

A name is used where its meaning is beyond doubt. Libraries disagree about the rest: does true in a mask mean "may attend"? Is W applied as
x @ W? How is a packed matrix split? An option that is given decides; what is left open is tried (tried.py).
"""

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from attend.attention.operators import OPERATORS
from attend.errors import did_you_mean
from attend.spec import DType
from attend.spec_parts import PROJECTIONS

Polarity = Literal["attend", "block", "add"]
MaskShape = Literal["q,k", "b,1,q,k", "b,q,k", "b,h,q,k", "b*h,q,k", "b,k", "b,1,1,k"]
MaskDType = Literal["bool", "int", "float"]
OutputLayout = Literal["b,h,n,d", "b,n,h,d", "n,b,h,d", "b,n,d"]
Layout = Literal[OutputLayout, "b,h,d"]
Orientation = Literal["in,out", "out,in"]
Alignment = Literal["top-left", "bottom-right"]
RopeTables = Literal["n,d/2", "n,d", "b,n,d/2", "b,n,d", "1,1,n,d/2", "1,1,n,d", "1,n,1,d/2", "1,n,1,d"]
Like = Literal[
    "flash_attn", "flash_attn_varlen", "flash_attn_with_kvcache", "sdpa", "flex_attention", "jax", "mlx", "transformers", "xformers", "onnx"
]
Fused = Literal["q,k,v", "per_head", "q,v,k", "k,q,v", "k,v,q", "v,q,k", "v,k,q", "per_number"]


class Ambiguous(ValueError):
    """Neither names nor options decide; the message asks for the `option`, of which `values` may be tried."""

    def __init__(self, message: str, option: str, values: Sequence[Any] = ()) -> None:
        super().__init__(f"ambiguous: {message}")
        self.option, self.values = option, values


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """The conventions of a candidate; each field is also an option of `compare`, `assert_agrees` and `attend check --with`."""

    like: Annotated[Like | None, "of a function: the one whose parameters, axes, masks and causal alignment it has"] = None
    mask_means: Annotated[Polarity | None, "true in a mask: may attend, is blocked, or is added to the scores (0 and -inf)"] = None
    mask_shape: Annotated[MaskShape, "axes of a mask"] = "q,k"
    mask_dtype: Annotated[MaskDType, "of a mask that is not added"] = "bool"
    padding_means: Annotated[Polarity | None, "true in a separate mask over the keys, [b, k]: may attend, is blocked, or is added"] = None
    arguments: Annotated[Mapping[str, str], 'what parameters are: {"x": "query", "A": "query.weight", …}'] = field(default_factory=dict)
    method: Annotated[str | None, "the method to call; by default the object itself, forward or call"] = None
    batched: Annotated[bool, "false: inputs are [n, d_model]"] = True
    batch_first: Annotated[bool | None, "false: inputs are [n, b, d_model]; by default the attribute batch_first, or true"] = None
    causal: Annotated[bool, "true: it is always causal"] = False
    mask_replaces_causality: Annotated[bool, "true: in calls with a mask, an always causal one does what the mask says alone"] = False
    query_offset: Annotated[
        Literal["start", "end"] | None, "of an always causal one, if q != k: query i is at key i, or the last query at the last key"
    ] = None
    layout: Annotated[
        Layout, "axes of the query, key and value of a function; b,h,d: it takes one query of each item, and keys [b,n,h,d]"
    ] = "b,h,n,d"
    output_layout: Annotated[OutputLayout | None, "axes of the output of a function, if they are others"] = None
    framework: Annotated[
        Literal["torch", "numpy", "jax", "mlx"] | None, "whose arrays it takes; numpy is tried, and torch and mlx where they are imported"
    ] = None
    dtype: Annotated[DType | None, "not for a module instance; by default float64 in NumPy, else float32"] = None
    device: Annotated[str | None, "of torch, such as cuda; not for a module instance"] = None
    orientation: Annotated[Orientation | None, "of a matrix that is not in a layer: applied as x @ W, or as x @ W.T"] = None
    fused: Annotated[
        Fused | None,
        "rows of one matrix for query, key and value: [3, h, d], in this order; per_head: [h, 3, d]; per_number: [d, 3, h]",
    ] = None
    norm_weights: Annotated[Literal["w", "1 + w"], "what norms of queries and keys multiply by, where w is their parameter"] = "w"
    rope_tables: Annotated[RopeTables | None, "axes of the cosines and sines that it takes, where d is the width that RoPE rotates"] = None
    page_size: Annotated[int, "rows of keys in a page, for what takes pages"] = 16
    weights: Annotated[
        Mapping[str, Any] | None,
        'names of the weights, if unknown: {"query": "layers.0", "output.bias": "b", …}; in Python also arrays [out, in]',
    ] = None
    new_cache: Annotated[
        str | None, "what makes the first call's cache, if calls change it in place: list, dict, or my_package:KVCache; by default None"
    ] = None
    d_model: Annotated[int, "of a class, which is constructed"] = 12
    num_heads: Annotated[int | None, "of an instance without such an attribute; a class gets 3 by default, or 6 if it has groups"] = None
    construct: Annotated[Mapping[str, Any], 'further arguments of the constructor: {"max_len": 64}'] = field(default_factory=dict)
    tolerance: Annotated[float | None, "relative; by default by dtype"] = None
    sizes: Mapping[str, str] = field(default_factory=dict)  # what parameters of the constructor are, by trial
    longest: int = 4104  # rows of a sequence that a class is constructed for
    left_out: tuple[str, ...] = ()  # norms around the attention, which calls leave out, by trial
    paged: bool = False  # whether every call gets pages, although its table of pages is optional, by trial
    window: tuple[int, int | None] | None = None  # keys before and after the own one of a layer without a spec, by trial
    residual: bool = False  # whether the query is added to the output, by trial
    off: Sequence[str] = ()  # what a class is constructed without, by the names of parameters and of what configurations are asked for
    sizes_read: Collection[str] = ()  # the meanings of what a class is constructed with
    one_length: bool = False  # whether it raises if there are more keys than queries, by trial
    tile: int = 1  # of whose rows all lengths are multiples, by trial
    given: frozenset[str] = frozenset()  # the options that are given, which no trial changes

    def tried(self, **values: Any) -> "Convention":
        """The convention with these values of options that are not given."""
        return replace(self, **{name: value for name, value in values.items() if name not in self.given})

    @property
    def takes_one_query(self) -> bool:
        """Whether the query has no axis for rows."""
        return self.layout == "b,h,d"

    @property
    def names_weights(self) -> bool:
        """Whether `weights` has names of the candidate's tensors, not arrays."""
        return any(isinstance(x, str) for x in (self.weights or {}).values())


OF_MASKS = {  # role of the parameter -> its conventions
    "mask": ("mask_means", "mask_shape", "mask_dtype", "mask_replaces_causality"),
    "padding": ("padding_means",),
}


POLARITY_OF: dict[str, Polarity] = {"attend_mask": "attend", "block_mask": "block"}  # name of a mask -> what it says of true in it


def mask_conventions(role: str, convention: Convention) -> Iterator[Convention]:
    """The conventions that the mask of this role may have, the most common first."""
    shapes: Sequence[Any] = get_args(MaskShape) if role == "mask" else (convention.mask_shape,)
    for shape, dtype, means in product(shapes, get_args(MaskDType), get_args(Polarity)):
        if means == "add" and dtype != "bool":
            continue
        yield convention.tried(**dict(zip(OF_MASKS[role], (means, shape, dtype), strict=False)))


OPTIONS: dict[str, Any] = {option.name: option.type for option in fields(Convention) if hasattr(option.type, "__metadata__")}


def make_convention(options: Mapping[str, Any]) -> Convention:
    """The convention with these options. TypeError: no such option. ValueError: not one of its values."""
    for name, value in options.items():
        if name not in OPTIONS:
            raise TypeError(f"expected an option among {', '.join(OPTIONS)}, got {name!r}{did_you_mean(name, OPTIONS)}")
        if not _fits(value, OPTIONS[name].__origin__):
            values = _values(OPTIONS[name].__origin__)
            raise ValueError(f"expected {name} to be {' or '.join(values)}, got {value!r}{did_you_mean(value, values)}")
    return Convention(**options, given=frozenset(options))


def option_table() -> list[tuple[str, list[str], str]]:
    """Name, values and meaning of each option."""
    return [(name, _values(option.__origin__), option.__metadata__[0]) for name, option in OPTIONS.items()]


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


def by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Name -> what it means, from meaning -> names."""
    return {name: meaning for meaning, names in table.items() for name in names.split()}


PAGE_TABLES = "block_table block_tables page_table page_tables"
HEADS = "num_heads n_heads heads h n_head nhead nheads num_attention_heads head_num"
CALL = {  # role of a parameter of the call -> its usual names, in lower case
    "query": "query queries q x x_q xq q_x input inputs inputs_q input_q hidden_states query_states embeddings",
    "key": "key keys k x_k xk inputs_k input_k key_states context memory encoder_hidden_states key_value_states kv x_kv kv_x xa",
    "value": "value values v x_v xv inputs_v input_v value_states",
    "mask": "mask attn_mask attention_mask attend_mask block_mask src_mask attn_bias",
    "padding": "key_padding_mask padding_mask pad_mask key_mask context_mask memory_key_padding_mask src_key_padding_mask",
    "lengths": "valid_lens valid_len valid_lengths valid_length lengths lens seq_lens seq_lengths kv_lens kv_lengths",
    "segments": "segments segment_ids segment_id document_ids document_id doc_ids sequence_ids seq_ids",
    "boundaries": "cu_seqlens cu_seq_lens cu_seqlens_q",
    "key_boundaries": "cu_seqlens_k cu_seqlens_kv",
    "page_table": PAGE_TABLES,  # [b, pages of an item]
    "max_queries": "max_seqlen_q",
    "max_keys": "max_seqlen max_seqlen_k max_seqlen_kv",
    "module": "",  # the layer that a function of transformers gets
    "unused": "",  # no call passes it
    "positions": "position_ids positions",
    "cosines": "cos cos_cached freqs_cos rope_cos cosine cosines",  # of RoPE, a number for each position and pair
    "sines": "sin sin_cached freqs_sin rope_sin sine sines",
    "cosines_and_sines": "position_embeddings rotary_pos_emb rotary_emb",  # a pair of arrays
    "turns": "freqs_cis freqs_complex",  # complex: cosine + i sine
    "cache": "cache kv_cache past layer_past past_kv past_key_value past_key_values",
    "use_cache": "use_cache",
    "cache_positions": "cache_position cache_positions",
    "first_position": "start_pos start_position past_length past_len cache_len",
    "causal": "causal is_causal use_causal_mask",
    "scale": "scale softmax_scale sm_scale scaling attn_scale",
    "softcap": "softcap soft_cap logit_cap logits_soft_cap attn_logit_softcapping logit_softcapping",
    "window": "window_size",
    "return_weights": "need_weights return_weights return_attn return_attention return_attn_weights return_attention_weights "
    "return_attention_scores output_attentions",
    "heads": HEADS,
    "key_heads": "num_kv_heads n_kv_heads num_key_value_heads kv_heads",
    "average": "average_attn_weights",
    "groups": "enable_gqa",  # whether several heads may share a key head
    "dropout": "dropout_p dropout dropout_prob dropout_rate attn_dropout attention_dropout p_dropout",  # the probability
    "training": "training is_training",  # whether it acts
}
OF_OPERATORS = tuple(name.partition(".")[0] for operator in OPERATORS for name in operator.axes)  # whose names mean themselves
# Role of a weight -> its names besides q_proj, W_q, wq, w_qs, query, queries, to_q, q_lin, linear_q, fc_out, b_o, bias_q, qkv_proj, …
WEIGHTS = dict.fromkeys(OF_OPERATORS, "") | {
    "in_proj": "in_proj c_attn",  # query, key and value in this order
    "output": "c_proj dense proj projection fc unify_heads combine_heads",
    "query_norm": "q_norm query_layernorm q_layernorm",
    "key_norm": "k_norm key_layernorm k_layernorm",
    "gate": "gate_proj g_proj linear_g",
    "query": "q_b_proj",
    "query_down": "q_a_proj",
    "query_down_norm": "q_a_layernorm",
    "key_value_down_norm": "kv_a_layernorm",
    "kv_a": "kv_a_proj_with_mqa",  # DeepSeek's: key_value_down and rope_key
    "kv_b": "kv_b_proj",  # DeepSeek's: key and value
    "head_norm": "subln",
    "relative_bias": "relative_attention_bias",
}
ROPE_TABLES = frozenset(("cosines", "sines", "cosines_and_sines", "turns"))  # roles of what is made of the angles of RoPE
KNOWN_DEFAULTS: dict[str, Callable[[Any], bool]] = {  # with another default, the parameter of this name may mean something else
    "scale": lambda default: default in (None, inspect.Parameter.empty),
    "softcap": lambda default: default is None or isinstance(default, int | float),
    "dropout": lambda default: default is inspect.Parameter.empty or isinstance(default, int | float),
    "training": lambda default: default in (None, True, False, inspect.Parameter.empty),
    "window": lambda default: isinstance(default, tuple | list) and len(default) == 2,  # (left, right), as in FlashAttention
    **dict.fromkeys(ROPE_TABLES, lambda default: default is inspect.Parameter.empty),
}
_CALL, _WEIGHTS = by_name(CALL), by_name(WEIGHTS) | dict(zip(OF_OPERATORS, OF_OPERATORS, strict=True))
_PROJECTION = re.compile(
    r"(?:(?:w|b|weight|bias|linear|lin|fc|to)_?)?"
    r"(?P<role>qkv|query_key_value|kv|queries|query|q|keys?|k|values?|v|output|out|o)s?"
    r"(?P<tail>(?:_?(?:projection|proj|linear|lin|layer|dense|weights?|bias|kernel|matrix|w|b))*)"
)
_ROLES = {"query_key_value": "qkv"} | by_name({"query": "q queries", "key": "k keys", "value": "v values", "output": "o out"})
_ANNOTATED = re.compile(r"linears\.([0-3])\.(weight|bias)")  # The Annotated Transformer: query, key, value, output in a list
BARE = frozenset([*PROJECTIONS, *_ROLES]) - {"query_key_value"}  # these may also be inputs
INPUTS = ("query", "key", "value", "mask")  # what a required parameter of unknown name may be
UNTYPED = tuple(name for operator in OPERATORS for name in operator.axes if "." not in name)  # weights without a kind
WEIGHT_ROLES = ("qkv", "kv", *PROJECTIONS, *WEIGHTS)


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
        role = arguments.get(name) or _role_of(name.lower(), parameter.default)
        if role == "unused":
            continue
        if role is None and name.lower() not in BARE and (weight := parse_weight_name(name)) in weights:
            role = weight
        if role is None and parameter.default is parameter.empty:
            known = f"one of {', '.join(CALL)}, or a weight such as query.weight"
            message = f'the meaning of parameter {name!r}; pass arguments={{"{name}": …}}, {known}'
            raise Ambiguous(message, "arguments", [{**arguments, name: guess} for guess in INPUTS if guess not in arguments.values()])
        if role in roles:
            if parameter.default is not parameter.empty:
                continue
            raise Ambiguous(f'which is the {role}, {roles[role]!r} or {name!r}; pass arguments={{"{name}": …}}', "arguments")
        if role is not None:
            roles[role] = name
    if unknown := {*arguments} - {*signature.parameters} or {*arguments.values()} - {*CALL, *weights}:
        known = f"{', '.join(CALL)} or a weight such as query.weight"
        raise ValueError(f"expected arguments to map {', '.join(signature.parameters)} to {known}, got {sorted(unknown)}")
    if "query" not in roles:
        names = ", ".join(signature.parameters)
        raise Ambiguous(f'which parameter of ({names}) is the query; pass arguments={{…: "query"}}', "arguments")
    return roles


def mask_of_memory(roles: Mapping[str, str], others: Sequence[str]) -> str | None:
    """The parameter, among `others`, that may take the place of the mask where optional keys are passed, as in BERT: its name begins as
    that of the keys, as `encoder_attention_mask` beside `encoder_hidden_states`."""
    word = roles.get("key", "").partition("_")[0]
    return next((name for name in others if "mask" in roles and name in {f"{word}_{mask}" for mask in CALL["mask"].split()}), None)


def _role_of(name: str, default: Any) -> str | None:
    """The role of a parameter with this name and default; None if they do not say."""
    role = _CALL.get(name)
    return None if role in KNOWN_DEFAULTS and not KNOWN_DEFAULTS[role](default) else role


def table_named(name: str) -> str | None:
    """The role of a parameter with this name, if it takes tables of RoPE."""
    return role if (role := _CALL.get(name.lower())) in ROPE_TABLES else None


def other_parameters(signature: inspect.Signature, roles: Mapping[str, str]) -> tuple[str, ...]:
    """The parameters that have a default and no role: no call passes them."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(name for name, parameter in signature.parameters.items() if parameter.kind not in kinds and name not in roles.values())
