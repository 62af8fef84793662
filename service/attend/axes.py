"""The tensors of a request and of a reply, each declared once.

By TENSOR_FIELDS requests are checked (`wire/shapes.py`), compared with their layer (`serving/layer_checks.py`), cut into parts
(`serving/request_type.py`), prepared for sessions (`serving/sessions/`), turned into calls (`serving/calls.py`, `attention/call.py`),
described in the OpenAPI document and under /v2, and given a batch axis in the reference.

The outputs of a layer are the values of its program (`outputs_of` in `attention/program.py`), and the gradients that are declared here.

b batch items, h heads, q queries, k keys, n rows of query and key alike; query_dim and the like are widths of the layer. A request whose
query has no batch axis has none in any tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

T = TypeVar("T", bound=Any)  # an array or a tensor
Shape = tuple[str, ...]  # the names of the axes
Kind = Literal["number", "bias", "mask", "count", "segment"]  # what the elements of a tensor of a request may be


@dataclass(frozen=True)
class TensorField:
    """A tensor of a request. By default it is refused beside several sequences in one query, and no call with it is computed in parts."""

    text: str  # the shapes that it may have, such as `q,k b,q,k`
    broadcast: str = ""  # letters of axes that may have length 1 and broadcast
    kind: Kind = "number"  # what its elements may be
    needs: str = ""  # the field that a request with it must have
    excludes: str = ""  # the field that a request with it must not have
    tensor: str = ""  # the name of its tensor in `Call` or `Masks`, if that is another; two names for two of them
    onto: str = ""  # the axes of that tensor; "": its own, with b
    at_least: str = ""  # the datatype of that tensor, unless the layer's is wider; "": the layer's
    packed: bool = False  # whether a request with several sequences in one query may have it; each gets its rows
    divisible: bool = False  # whether a call with it may be computed in parts that have some of the keys each
    stacked: bool = True  # whether calls with it may be computed together
    new_rows: bool = False  # whether a step of a session has it for its new rows alone
    inverted: bool = False  # whether true means blocked, unlike in its tensor
    prepared_once: bool = False  # whether requests of one shape are: only its elements, each by itself, may make one invalid
    value: str = ""  # what the steps of a program that read it call it; "": none reads it under its own name
    adds_step: bool = False  # whether programs have steps for calls with it: that name is a feature of such calls
    after_heads: bool = False  # whether it changes the heads' outputs, and so is applied once to those of all parts

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(tuple(shape.split(",")) for shape in self.text.split())

    @cached_property
    def unbatched(self) -> tuple[Shape, ...]:
        """The shapes of a request without a batch."""
        return tuple(dict.fromkeys(tuple(axis for axis in shape if axis != "b") for shape in self.shapes))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, with and without a batch axis."""
        return tuple(sorted({len(shape) for shape in (*self.shapes, *self.unbatched)}))

    @property
    def axes(self) -> str:
        """The axes of its tensor, where the axes that it does not have are 1."""
        own = {axis for shape in self.shapes for axis in shape}
        return ",".join(axis if axis in own else "1" for axis in (self.onto.split(",") if self.onto else self.shapes[-1]))

    def __contains__(self, axis: str) -> bool:
        """Whether one of the shapes has the axis."""
        return any(axis in shape for shape in self.shapes)

    def of(self, rank: int, batched: bool) -> Shape:
        """The names of the axes of a tensor of this rank."""
        return next(shape for shape in (self.shapes if batched else self.unbatched) if len(shape) == rank)

    def expanded(self, tensor: T, batched: bool) -> T:
        """The tensor with the axes of `onto`: those that it does not have have length 1."""
        expanded: T = tensor[self._expansions[tensor.ndim, batched]]
        return expanded

    @cached_property
    def _expansions(self) -> dict[tuple[int, bool], tuple[slice | None, ...]]:
        """(rank, whether the request is batched) -> the index of a tensor that adds the axes which it does not have."""
        found = {}
        for batched, shapes in ((True, self.shapes), (False, self.unbatched)):
            for axes in shapes:
                onto = self.onto.split(",") if self.onto else axes if batched else ("b", *axes)
                found[len(axes), batched] = tuple(slice(None) if axis in axes else None for axis in onto)
        return found

    @property
    def broadcasts(self) -> str:
        """What broadcasts, in words; "" if nothing does."""
        return "" if not self.broadcast else "b may be 1" if self.broadcast == "b" else "axes of 1 broadcast"

    def __str__(self) -> str:
        """For descriptions: "[q,k], [b,q,k] or [b,h,q,k]; axes of 1 broadcast"."""
        *others, last = [f"[{','.join(shape)}]" for shape in self.shapes]
        shapes = f"{', '.join(others)} or {last}" if others else last
        return f"{shapes}; {self.broadcasts}" if self.broadcast else shapes


PAIRS, ROWS, OF_HEADS = "q,k b,q,k b,h,q,k", "h b,h b,h,q", "h b,h"
INPUTS = {
    "query": TensorField("b,q,query_dim", packed=True, divisible=True, new_rows=True, prepared_once=True),
    "key": TensorField("b,k,key_dim", packed=True, divisible=True, new_rows=True, prepared_once=True),
    "value": TensorField("b,k,value_dim", needs="key", packed=True, divisible=True, new_rows=True, prepared_once=True),
}
MASKS = {  # which `attention/masks.py` combines
    "attend_mask": TensorField(PAIRS, "bhqk", "mask", onto="b,h,q,k", divisible=True, prepared_once=True),
    "block_mask": TensorField(
        PAIRS,
        "bhqk",
        "mask",
        excludes="attend_mask",
        tensor="attend_mask",
        onto="b,h,q,k",
        divisible=True,
        inverted=True,
        prepared_once=True,
    ),
    "bias": TensorField(PAIRS, "bhqk", "bias", onto="b,h,q,k", divisible=True, prepared_once=True),
    "attend_keys": TensorField("b,k", "bk", "mask", divisible=True, prepared_once=True),
    "block_keys": TensorField(
        "b,k", "bk", "mask", excludes="attend_keys", tensor="attend_keys", divisible=True, inverted=True, prepared_once=True
    ),
    "valid_lens": TensorField("b b,q", kind="count", tensor="lengths", onto="b,q", divisible=True, prepared_once=True),
    "segments": TensorField("b,n", "bn", "segment", tensor="query_segments key_segments", divisible=True, prepared_once=True),
    "query_segments": TensorField("b,q", "bq", "segment", needs="key_segments", excludes="segments", divisible=True, prepared_once=True),
    "key_segments": TensorField("b,k", "bk", "segment", needs="query_segments", excludes="segments", divisible=True, prepared_once=True),
}
LENGTHS = {
    "query_lengths": TensorField("sequences", kind="count", packed=True),
    "key_lengths": TensorField("sequences", kind="count", needs="query_lengths", packed=True),
}
OPTIONAL_INPUTS = {  # beside masks
    "positions": TensorField(
        "b,q b,q,axes",
        "b",
        tensor="query_coordinates",
        at_least="float64",
        packed=True,
        divisible=True,
        new_rows=True,
    ),
    "key_positions": TensorField(
        "b,k b,k,axes",
        "b",
        needs="positions",
        tensor="key_coordinates",
        at_least="float64",
        packed=True,
        divisible=True,
        new_rows=True,
    ),
    "head_scale": TensorField(
        OF_HEADS, onto="b,h,q,k", packed=True, divisible=True, prepared_once=True, value="head_scale", adds_step=True, after_heads=True
    ),
    "pattern": TensorField(PAIRS, "bhqk", onto="b,h,q,k", at_least="float32", value="pattern", adds_step=True),
    "pattern_rows": TensorField(ROWS, "bhq", "mask", needs="pattern", onto="b,h,q,k", value="pattern_rows"),
    "head_outputs": TensorField("b,h,q,value_head_dim", "bhq", value="other_heads", adds_step=True),
    "head_output_rows": TensorField(ROWS, "bhq", "mask", needs="head_outputs", onto="b,h,q,k", value="other_head_rows"),
    "output_gradient": TensorField("b,q,output_dim", needs="outputs", packed=True, stacked=False),
}
OF_ANALYSES = {"direction": TensorField("b,q,output_dim")}
TENSOR_FIELDS: Mapping[str, TensorField] = INPUTS | MASKS | LENGTHS | OPTIONAL_INPUTS | OF_ANALYSES
CALL_TENSORS = {field.tensor or name: field for name, field in OPTIONAL_INPUTS.items()}  # by their names in `Call.optional_inputs`
PROGRAM_TENSORS = {name: field for name, field in CALL_TENSORS.items() if field.value}
FEATURES = {field.value: name for name, field in PROGRAM_TENSORS.items() if field.adds_step}  # feature -> tensor in `Call.optional_inputs`

GRADIENTS: Mapping[str, str] = {  # outputs that are no value of a program -> their axes
    "query_gradient": "b,q,query_dim",
    "key_gradient": "b,k,key_dim",
    "value_gradient": "b,k,value_dim",
}
MINUS_INFINITY = frozenset({"scores", "log_sum_exp", "score_bias"})  # outputs of which -inf is a value
