"""Functions whose parameters and conventions are known: `like="flash_attn"` says that a candidate has those of that function.

The functions of these libraries themselves are recognised by their module and name. A candidate whose name begins with `flash_attn`, or
that has the name and the parameters of torch's function, is like that one, but for the axes of its inputs, which are tried.
"""

import inspect
import re
import sys
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from attend.check.convention import INPUTS, PAGE_TABLES, Alignment, Convention, Like, by_name


@dataclass(frozen=True, slots=True)
class KnownFunction:
    """Options that `like` stands for, and the meaning of parameters whose names do not say it. `path`: a pattern of module and name."""

    title: str
    path: str
    options: Mapping[str, Any]
    arguments: Mapping[str, str] = field(default_factory=dict)
    alignment: Alignment | None = None  # of causal calls with more or fewer keys than queries
    adds_numbers: bool = False  # whether its mask may also be numbers, which are added
    required: tuple[str, ...] = ()  # parameters without a default besides the inputs, if it shows none
    others: tuple[str, ...] = ()  # those that no case passes, likewise
    own_name: str = ""  # of a candidate that is like this function, if its name has to be the same
    own_parameters: frozenset[str] = frozenset()  # which only candidates that are like it have

    @property
    def settings(self) -> set[str]:
        """The parameters besides inputs and masks."""
        return {*self.others, *(name for name, role in self.arguments.items() if role not in INPUTS)}

    def is_like(self, name: str, parameters: Set[str]) -> bool:
        """Whether a function of this name that has these parameters is one like it."""
        return bool(self.own_parameters) and self.own_name in ("", name) and parameters >= self.own_parameters


HEADS_SECOND, HEADS_THIRD = {"layout": "b,h,n,d"}, {"layout": "b,n,h,d"}
ADDED = {"mask_means": "add", "mask_shape": "b,1,q,k"}
OF_PAGES = by_name(
    {
        "key": "k_cache key_cache k_pages key_pages",
        "value": "v_cache value_cache v_pages value_pages",
        "lengths": "cache_seqlens seqlens context_lens",
    }
)
FLASH = r"(.*\.)?flash_attn"
FUNCTIONS: dict[Like, KnownFunction] = {
    "flash_attn_varlen": KnownFunction(
        "flash_attn_varlen_func", rf"{FLASH}_varlen\w*", {**HEADS_THIRD, "batched": False}, alignment="bottom-right"
    ),
    "flash_attn_with_kvcache": KnownFunction(
        "flash_attn_with_kvcache",
        rf"{FLASH}_with_kvcache",
        HEADS_THIRD,
        {"k_cache": "key", "v_cache": "value", "cache_seqlens": "lengths", "k": "unused", "v": "unused"},
        "bottom-right",
    ),
    "flash_attn": KnownFunction("flash_attn", rf"{FLASH}\w*", HEADS_THIRD, alignment="bottom-right"),
    "sdpa": KnownFunction(
        "torch's scaled_dot_product_attention",
        r"torch\..*\.scaled_dot_product_attention",
        {**HEADS_SECOND, "mask_means": "attend"},
        {"query": "query", "key": "key", "value": "value", "attn_mask": "mask", "is_causal": "causal", "scale": "scale"}
        | {"enable_gqa": "groups", "dropout_p": "dropout"},
        "top-left",
        adds_numbers=True,
        own_name="scaled_dot_product_attention",
        own_parameters=frozenset(("attn_mask", "dropout_p", "is_causal")),
    ),
    "flex_attention": KnownFunction("flex_attention", r"torch\..*\.flex_attention", HEADS_SECOND, {"block_mask": "unused"}),
    "jax": KnownFunction(
        "jax.nn.dot_product_attention",
        r"jax\..*\.dot_product_attention",
        {**HEADS_THIRD, "framework": "jax", "mask_means": "attend", "mask_shape": "b,1,q,k"},
        {"key_value_seq_lengths": "lengths"},
        "top-left",
    ),
    "mlx": KnownFunction(
        "mx.fast.scaled_dot_product_attention",
        r"mlx\..*\.scaled_dot_product_attention",
        {**HEADS_SECOND, "framework": "mlx", "mask_means": "attend", "mask_shape": "b,1,q,k"},
        {"q": "query", "k": "key", "v": "value", "scale": "scale", "mask": "mask"},
        adds_numbers=True,
        required=("scale",),
    ),
    "transformers": KnownFunction(
        "the attention functions of transformers",
        r"transformers\..*attention_forward",
        {**HEADS_SECOND, **ADDED, "output_layout": "b,n,h,d"},
        {"module": "module", "scaling": "scale", "softcap": "softcap", "is_causal": "unused"},
        own_parameters=frozenset(("module", "query", "key", "value", "attention_mask", "scaling")),
    ),
    "xformers": KnownFunction(
        "xformers' memory_efficient_attention",
        r"xformers\..*\.memory_efficient_attention\w*",
        {**HEADS_THIRD, **ADDED, "mask_shape": "b,h,q,k"},
        {"attn_bias": "mask", "scale": "scale"},
    ),
    "onnx": KnownFunction(
        "ONNX's operator Attention",
        r"onnx\..*\._compute_attention",
        {**HEADS_SECOND, "mask_means": "attend", "mask_shape": "b,1,q,k"},
        {"Q": "query", "K": "key", "V": "value", "attn_mask": "mask", "nonpad_kv_seqlen": "lengths"},
        "top-left",
        adds_numbers=True,
    ),
}


def of_torch(candidate: Any) -> bool:
    """Whether it is torch's own function or module, whose masks may also be numbers."""
    torch = sys.modules.get("torch")
    return _is_multihead(candidate) or (torch is not None and candidate is torch.nn.functional.scaled_dot_product_attention)


def _is_multihead(candidate: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(candidate if isinstance(candidate, type) else type(candidate), torch.nn.MultiheadAttention)


def with_signature(candidate: Any, convention: Convention) -> Convention:
    """The convention with the options that `like` stands for, or the name of a known function or class; those that are given stay."""
    if _is_multihead(candidate):
        convention = convention.tried(mask_means="block", padding_means="block")
    function = getattr(candidate, "func", candidate)  # of a partial function
    path = f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', '')}"
    name = path.rpartition(".")[2]
    known = next((like for like, known in FUNCTIONS.items() if re.fullmatch(known.path, path)), None)
    own = next((like for like, known in FUNCTIONS.items() if known.is_like(name, _parameters(function))), None)
    if (like := convention.like or known or own) is None:
        return convention
    options = {name: value for name, value in FUNCTIONS[like].options.items() if name not in convention.given}
    is_certain = "like" in convention.given or (known is not None and not name.startswith("flash_attn"))
    given = convention.given | ({*options} if is_certain else {*options} - {"layout"})
    return replace(convention, like=like, given=given, **options)


def _parameters(function: Any) -> Set[str]:
    """The names of a function's parameters, if it shows them."""
    with suppress(TypeError, ValueError):
        return inspect.signature(function).parameters.keys()
    return frozenset()


def known_arguments(convention: Convention, signature: inspect.Signature | None) -> dict[str, str]:
    """What the parameters of a candidate are: as `arguments` says, or as those of the function that it is like. None: it shows none."""
    known = FUNCTIONS[convention.like].arguments if convention.like else {}
    if signature is not None and not signature.parameters.keys().isdisjoint(PAGE_TABLES.split()):
        known = {**OF_PAGES, **known}
    has = {name: role for name, role in known.items() if signature is None or name in signature.parameters}
    return has | dict(convention.arguments)


def function_like(signature: inspect.Signature) -> Like | None:
    """The function that a candidate's parameters are those of; None if they are of none with an alignment of its own."""
    names = signature.parameters.keys()
    if "causal" in names and not names.isdisjoint({"softmax_scale", "window_size"}):
        return "flash_attn"
    return "sdpa" if "is_causal" in names and not names.isdisjoint({"attn_mask", "dropout_p"}) else None
