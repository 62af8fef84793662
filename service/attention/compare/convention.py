"""The options that say how a candidate is constructed and called, where libraries disagree and names do not decide.

Does true in a mask mean "may attend"? Is W applied as x @ W? How is a packed matrix split? Nothing is guessed: without the option a
ValueError names it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from service.spec import DType

Polarity = Literal["attend", "block", "add"]


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
    fused: Annotated[
        Literal["q,k,v", "per_head"] | None,
        "rows of one matrix for query, key and value: [3, h, d], or [h, 3, d]; for query and gate: [2, h, d], or [h, 2, d]",
    ] = None
    norm_weights: Annotated[Literal["w", "1 + w"], "what norms of queries and keys multiply by, where w is their parameter"] = "w"
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


OPTIONS: dict[str, Any] = {option.name: option.type for option in fields(Convention)}  # their `Annotated` types


def make_convention(options: Mapping[str, Any]) -> Convention:
    """The convention with these options. TypeError: no such option. ValueError: not one of its values."""
    for name, value in options.items():
        if name not in OPTIONS:
            raise TypeError(f"expected an option among {', '.join(OPTIONS)}, got {name!r}")
        if not _fits(value, OPTIONS[name].__origin__):
            raise ValueError(f"expected {name} to be {' or '.join(_values(OPTIONS[name].__origin__))}, got {value!r}")
    return Convention(**options)


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
