"""Constructs a class: with sizes under the names that people give them, and objects that have them as attributes.

In a torch module, a parameter whose numbers are all equal gets random ones added: zeros would hide a forgotten bias, ones a forgotten norm.
So does a copy of another parameter, which would hide that one is used for the other.

A parameter whose name says nothing is tried as each size that is still missing (trial.py). What a configuration is asked for by a name
that says nothing raises AttributeError, or KeyError, as of one without it.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from itertools import permutations
from types import UnionType
from typing import Any, Union, get_args, get_origin

from attend.check.convention import HEADS, Ambiguous, Convention, by_name
from attend.check.weights import multi_head
from attend.spec import LayerSpec

NAMES = by_name(
    {
        "d_model": "d_model n_embd d_in d_out query_size key_size value_size c_q c_k c_v nx",
        "num_heads": HEADS,
        "num_kv_heads": "num_kv_heads n_kv_heads num_key_value_heads kv_heads n_kv_head n_local_heads num_query_groups n_groups",
        "head_dim": "head_dim d_k d_q d_kv d_head dim_head head_size kv_channels query_pre_attn_scalar",
        "length": "context_length block_size n_ctx ctx_len n_positions max_position_embeddings",
        "dropout": "p p_drop",
        "theta": "rope_theta theta rope_base rotary_base rotary_emb_base rope_freq_base emb_base base",
        "original_max_position": "original_max_position original_max_position_embeddings original_max_pos old_context_len",
        "query_rank": "q_lora_rank",
        "key_value_rank": "kv_lora_rank",
        "rope_key_dim": "qk_rope_head_dim",
        "own_key_dim": "qk_nope_head_dim",
        "value_head_dim": "v_head_dim d_v",
        "window": "sliding_window window_size window local_window attention_window",  # in keys
        "buckets": "relative_attention_num_buckets num_buckets",
        "max_distance": "relative_attention_max_distance max_distance",
    }
)
PATTERNS = (  # of a name in lower case, the first that is found in it
    ("dropout", "drop"),
    ("num_kv_heads", "kv.*heads|(key|value)s?.*heads"),
    ("head_dim", "head_?(dim|size|width)|(dim|size)_(per_)?head|_per_head"),
    ("num_heads", "head"),
    ("length", "(max|seq|ctx|context|block|window|num)_?.*(len|pos|size|tokens)|len$|length"),
    ("d_model", "dim|size|width|hid|emb|model|channels|features|units|inputs?$|outputs?$"),
)
OTHERS: dict[str, Any] = {  # names in configurations and required parameters that are no sizes
    "bias": True, "qkv_bias": True, "use_bias": True, "attention_bias": True, "attn_bias": True, "device": "cpu", "batch_size": 2,
    "layer_idx": 0, "layer_id": 0, "layer_number": 1, "n_layer": 1, "num_layers": 1, "num_hidden_layers": 1, "vocab_size": 64,
    "is_decoder": False, "flash": False, "masked": False, "mask": False, "causal": False, "scale": True,
    "max_batch_size": 4, "rope_scaling": None, "sliding_window": None, "attn_logit_softcapping": None,
    "_attn_implementation": "eager", "attention_type": "eager",
    "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "rms_norm_eps": 1e-6, "norm_eps": 1e-6, "seed": 0, "rng": None,
    "initializer_range": 0.02, "chunk_size_feed_forward": 0,
}  # fmt: skip
SWITCHES = {name for name, value in OTHERS.items() if (value is None or value is False) and name != "rng"}
USUAL = {"theta": 1e4, "buckets": 32, "max_distance": 128}  # what a configuration is asked for that the layer does not say
CONFIGURATION = re.compile("(.*_)?(config|configuration|cfg|conf|args|params|hparams|opts?|options|hp)")
PLACES = ("layer_idx", "layer_id", "layer_number")  # of the layer in its model: None by default, although its type is looked up by it
SIZES = ("d_model", "num_heads", "head_dim", "length", "num_kv_heads")  # what a name that says nothing may stand for


class Configuration(dict[str, Any]):
    """What a constructor asks a configuration for, by attribute or key. `asked` becomes the meanings of the sizes among them; to `off`
    are added the names, after that of the parameter, of what is switched off or unknown."""

    def __init__(self, sizes: Mapping[str, Any], parameter: str, off: list[str]) -> None:
        super().__init__()
        self.sizes, self.asked, self.parameter, self.off = sizes, dict[str, str](), parameter, off

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(f"a configuration without {error}: pass construct={{…}} with an object that has it") from None

    def __missing__(self, name: str) -> Any:
        meaning = None if name.startswith("__") else meaning_of(name)
        if meaning is not None and meaning in self.sizes:
            self.asked[name] = meaning
            return self.sizes[meaning]
        if (name in SWITCHES or name not in OTHERS) and not name.startswith("__"):
            self.off.append(f"{self.parameter}.{name}")
        if name in OTHERS:
            return OTHERS[name]
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and (name in NAMES or name in OTHERS))

    def get(self, name: str, default: Any = None) -> Any:
        with suppress(KeyError):
            return self[name]
        return default


def meaning_of(name: str) -> str | None:
    """What size a parameter of this name stands for; None if its name does not say."""
    name = name.lower()
    if name in OTHERS and name not in NAMES:
        return None
    return NAMES.get(name) or next((meaning for meaning, pattern in PATTERNS if re.search(pattern, name)), None)


def sizes_of(spec: LayerSpec, length: int, *, evaluates: bool, batch_first: bool) -> dict[str, Any]:
    """The values of the sizes, and of other arguments whose names are known.

    `evaluates`: the class has an evaluation mode, in which dropout must not act, so that it gets 0.1; other classes get 0.
    """
    sizes: dict[str, Any] = {name: getattr(spec, name) for name in ("d_model", "num_heads", "num_kv_heads", "head_dim", "value_head_dim")}
    sizes |= {"length": length, "dropout": 0.1 if evaluates else 0.0, "batch_first": batch_first}
    if spec.rope:
        sizes["theta"] = spec.rope.theta
        if spec.rope.scaling:
            sizes["original_max_position"] = spec.rope.scaling.original_max_position
    if spec.window and spec.window.left is not None:
        sizes["window"] = 1 + spec.window.left + (spec.window.right or 0)
    if spec.relative_bias:
        sizes |= {name: getattr(spec.relative_bias, name) for name in ("buckets", "max_distance")}
    if spec.latent:
        sizes |= {name: getattr(spec.latent, name) for name in ("query_rank", "key_value_rank", "rope_key_dim")}
        sizes["own_key_dim"] = spec.head_dim - spec.latent.rope_key_dim
    return sizes


def constructor_arguments(
    signature: inspect.Signature, convention: Convention, spec: LayerSpec, off: list[str], *, evaluates: bool
) -> dict[str, Any]:
    """Arguments for a class: the sizes of the spec under its names for them, and batch first. The names of what is switched off are added
    to `off`.

    A class with an evaluation mode keeps its own default of dropout, so that dropout that acts shows. Ambiguous: a required parameter of
    unknown name.
    """
    sizes = sizes_of(spec, convention.longest, evaluates=evaluates, batch_first=convention.batch_first is not False)
    given, unknown = dict[str, Any](), list[str]()
    for name, parameter in signature.parameters.items():
        if name in convention.construct or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        meaning = convention.sizes.get(name) or ("batch_first" if name == "batch_first" else meaning_of(name))
        is_required = parameter.default is parameter.empty
        annotated = _dataclass_in(parameter.annotation)
        if (is_required and CONFIGURATION.fullmatch(name.lower())) or (annotated and parameter.default in (None, parameter.empty)):
            given[name] = _configuration(annotated, sizes, name, off)
        elif meaning in sizes:
            has_default = parameter.default is not None or meaning in ("num_kv_heads", "window")  # None hides groups and windows
            if is_required or (has_default and not (meaning == "dropout" and evaluates)):
                given[name] = sizes[meaning]
        elif name in OTHERS and (is_required or (name in PLACES and parameter.default is None)):
            given[name] = OTHERS[name]
            off += [name] if name in SWITCHES else []
        elif is_required and meaning == "window":  # of a layer without one
            given[name] = sizes["length"]
        elif is_required:
            unknown.append(name)
    if unknown:
        text = f"the value of constructor parameter {unknown[0]!r}; pass construct={{{unknown[0]!r}: …}}, or an instance"
        raise Ambiguous(text, "sizes", [dict(convention.sizes) | meanings for meanings in _meanings(unknown, signature)])
    return given | dict(convention.construct)


def _meanings(unknown: list[str], signature: inspect.Signature) -> Iterator[dict[str, str]]:
    """What parameters may be whose names do not say: sizes that no other parameter is."""
    if len(unknown) > 3:
        return
    known = {meaning_of(name) for name in signature.parameters if name not in unknown}
    left = [size for size in SIZES if size not in known]
    yield from (dict(zip(unknown, sizes, strict=True)) for sizes in permutations(left, len(unknown)))


def _dataclass_in(annotation: Any) -> Any:
    """The dataclass that an annotation is, or has among its alternatives; None if there is none."""
    return next((x for x in (annotation, *get_args(annotation)) if isinstance(x, type) and is_dataclass(x)), None)


def _configuration(annotated: Any, sizes: Mapping[str, Any], name: str, off: list[str]) -> Any:
    """An object with these sizes: of the annotated dataclass, if it can be made, or one that answers to all usual names."""
    if annotated is not None:
        values = dict(_values_of(fields(annotated), sizes))
        for without in (None, sizes["length"]):  # a class that validates its fields may have a window in all layers
            with suppress(Exception):  # it may require what is not known
                made = annotated(**{name: without if value is None else value for name, value in values.items()})
                off += [f"{name}.{x.name}" for x in fields(made) if meaning_of(x.name) == "window" and getattr(made, x.name) is None]
                return made
    return Configuration(USUAL | dict(sizes), name, off)


def _values_of(fields_of: Iterable[Field[Any]], sizes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The sizes, and other values of known names, for those fields of a configuration whose defaults are of the same kind."""
    for field in fields_of:
        meaning = meaning_of(field.name) or ""
        if meaning in sizes or (field.name in OTHERS and field.name not in ("mask", "causal")):
            value = sizes[meaning] if meaning in sizes else OTHERS[field.name]
            is_alike = None in (value, field.default) or field.default is MISSING or _kind_of(value) is _kind_of(field.default)
            if is_alike and _takes(field.type, value):
                yield field.name, value


def _takes(annotation: Any, value: Any) -> bool:
    """Whether a field of this annotation may be the value; true if its alternatives are not all classes. A size is no float."""
    alternatives = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    classes = tuple(get_origin(x) or x for x in alternatives)
    is_whole = isinstance(value, float) and value.is_integer() and int in classes
    return value is None or is_whole or not all(isinstance(x, type) for x in classes) or isinstance(value, classes)


def _kind_of(value: Any) -> type:
    return float if type(value) is int else type(value)


def constructed(cls: type, spec: LayerSpec | None, convention: Convention, seed: int, groups: bool) -> tuple[Any, Convention]:
    """An instance, and the convention with the sizes it was constructed with.

    Without a spec, and with `groups`, a class that has a number of heads of keys gets fewer of them than of queries, so that the order of
    groups shows. Ambiguous: its constructor refuses all that is known to be tried.
    """
    heads = convention.num_heads or 3
    window = {"window": dict(zip(("left", "right"), convention.window, strict=True))} if convention.window else {}
    sizes = spec or multi_head(convention.d_model, heads, num_kv_heads=heads if heads % 2 or not groups else heads // 2, **window)
    torch = sys.modules.get("torch")
    makes_modules = torch is not None and issubclass(cls, torch.nn.Module)
    off = list[str]()
    arguments = constructor_arguments(inspect.signature(cls), convention, sizes, off, evaluates=makes_modules)
    if torch is None or not makes_modules:
        made = _instance(cls, arguments)
    else:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(seed)  # torch.manual_seed keeps a stack trace for each device that is not used yet
            module = _instance(cls, arguments)
            _tell_parameters_apart([parameter for parameter in module.parameters() if not hasattr(parameter, "materialize")])
            dtype = None if convention.dtype is None else getattr(torch, convention.dtype)
            made = module.to(device=convention.device, dtype=dtype)
    meanings = _sizes_constructed(arguments, convention, sizes)
    if groups and spec is None and convention.num_heads is None and {"num_heads", "num_kv_heads"} <= meanings.keys():
        with suppress(Exception):  # it may take as many alone
            return constructed(cls, spec, replace(convention, d_model=2 * convention.d_model, num_heads=2 * heads), seed, groups)
    return made, replace(convention, num_heads=convention.num_heads or meanings.get("num_heads"), off=off, sizes_read=frozenset(meanings))


def _instance(cls: type, arguments: Mapping[str, Any]) -> Any:
    """An instance. ValueError: its constructor raised."""
    try:
        return cls(**arguments)
    except Ambiguous:
        raise
    except Exception as error:
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise ValueError(f"{type(error).__name__}: {error}; constructed with {given}") from error


def _sizes_constructed(arguments: Mapping[str, Any], convention: Convention, spec: LayerSpec) -> dict[str, Any]:
    """The sizes that a constructor was given, by parameters or a configuration, by their meanings."""
    meanings = {convention.sizes.get(name) or meaning_of(name) or "": value for name, value in arguments.items()}
    asked = {meaning for value in arguments.values() if isinstance(value, Configuration) for meaning in value.asked.values()}
    fields = {meaning_of(name) for value in arguments.values() for name in getattr(value, "__dataclass_fields__", ())}
    return dict.fromkeys(asked) | meanings | {x: getattr(spec, x) for x in ("num_heads", "num_kv_heads") if x in asked | fields}


def _tell_parameters_apart(parameters: Sequence[Any]) -> None:
    """Adds random numbers to parameters whose numbers are all equal, which hide mistakes, and to copies of earlier parameters, which hide
    that one is used for the other."""
    randn_like = sys.modules["torch"].randn_like
    for i, parameter in enumerate(parameters):
        is_copy = any(x.shape == parameter.shape and bool((x == parameter).all()) for x in parameters[:i])
        if is_copy or bool((parameter == parameter.flatten()[:1]).all()):
            parameter.add_(randn_like(parameter), alpha=0.3)
