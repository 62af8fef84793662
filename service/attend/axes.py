"""The tensors of a request and of a reply, each declared once.

By AXES requests are checked (`wire/shapes.py`), compared with their layer (`serving/layer_checks.py`), turned into calls
(`serving/calls.py`), described in the OpenAPI document and under /v2, and given a batch axis in the reference.

By OUTPUTS the shapes of replies are predicted (`serving/cost.py`), calls computed (`attention/call.py`), several sequences in one query put
together, and outputs described in the OpenAPI document and under /v2.

b batch items, h heads, q queries, k keys, n rows of query and key alike; query_dim and the like are widths of the layer. A request whose
query has no batch axis has none in any tensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

T = TypeVar("T", bound=Any)  # an array or a tensor
Shape = tuple[str, ...]  # the names of the axes


@dataclass(frozen=True)
class Axes:
    """The shapes that a tensor may have, such as `q,k b,q,k`, and the axes that may have length 1 and broadcast."""

    text: str
    broadcast: str = ""  # letters of axes

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

    def __contains__(self, axis: str) -> bool:
        """Whether one of the shapes has the axis."""
        return any(axis in shape for shape in self.shapes)

    def of(self, rank: int, batched: bool) -> Shape:
        """The names of the axes of a tensor of this rank."""
        return next(shape for shape in (self.shapes if batched else self.unbatched) if len(shape) == rank)

    def expanded(self, tensor: T, batched: bool, onto: Sequence[str]) -> T:
        """The tensor with the axes `onto`: those that it does not have have length 1."""
        lengths = dict(zip(self.of(tensor.ndim, batched), tensor.shape, strict=True))
        expanded: T = tensor.reshape([lengths.get(axis, 1) for axis in onto])
        return expanded

    @property
    def broadcasts(self) -> str:
        """What broadcasts, in words; "" if nothing does."""
        return "" if not self.broadcast else "b may be 1" if self.broadcast == "b" else "axes of 1 broadcast"

    def __str__(self) -> str:
        """For descriptions: "[q,k], [b,q,k] or [b,h,q,k]; axes of 1 broadcast"."""
        *others, last = [f"[{','.join(shape)}]" for shape in self.shapes]
        shapes = f"{', '.join(others)} or {last}" if others else last
        return f"{shapes}; {self.broadcasts}" if self.broadcast else shapes


SEQUENCES = {"query": Axes("b,q,query_dim"), "key": Axes("b,k,key_dim"), "value": Axes("b,k,value_dim")}
AXES: Mapping[str, Axes] = SEQUENCES | {
    "attend_mask": Axes("q,k b,q,k b,h,q,k", broadcast="bhqk"),
    "block_mask": Axes("q,k b,q,k b,h,q,k", broadcast="bhqk"),
    "bias": Axes("q,k b,q,k b,h,q,k", broadcast="bhqk"),
    "attend_keys": Axes("b,k", broadcast="bk"),
    "block_keys": Axes("b,k", broadcast="bk"),
    "valid_lens": Axes("b b,q"),
    "segments": Axes("b,n", broadcast="bn"),
    "query_segments": Axes("b,q", broadcast="bq"),
    "key_segments": Axes("b,k", broadcast="bk"),
    "query_lengths": Axes("sequences"),
    "key_lengths": Axes("sequences"),
    "positions": Axes("b,q b,q,axes", broadcast="b"),
    "key_positions": Axes("b,k b,k,axes", broadcast="b"),
    "head_scale": Axes("h b,h"),
    "pattern": Axes("q,k b,q,k b,h,q,k", broadcast="bhqk"),
    "pattern_rows": Axes("h b,h b,h,q", broadcast="bhq"),
    "head_outputs": Axes("b,h,q,value_head_dim", broadcast="bhq"),
    "head_output_rows": Axes("h b,h b,h,q", broadcast="bhq"),
    "output_gradient": Axes("b,q,output_dim"),
    "direction": Axes("b,q,output_dim"),  # of an analysis
}

Source = Literal["projections", "scores", "heads", "operator", "gradients"]


@dataclass(frozen=True)
class OutputTensor:
    """An output: its axes, such as `b,h,q,k`, what it is computed from, and its V2 datatype, "" for that of the reply.

    Layers have an output of an operator if they have the operator; its other axes are fields of the operator's part of the spec.
    """

    text: str
    source: Source
    datatype: str = ""
    minus_infinity: bool = False  # whether -inf is a value of it

    @cached_property
    def axes(self) -> Shape:
        return tuple(self.text.split(","))

    @property
    def by_sequence(self) -> bool:
        """Whether each of several sequences in one query has its own, since it has an axis of queries and one of keys."""
        return "q" in self.axes and "k" in self.axes

    @property
    def row_axis(self) -> int:
        """The axis of queries, or else of keys, counted from the end."""
        return (self.axes.index("q") if "q" in self.axes else self.axes.index("k")) - len(self.axes)

    def __str__(self) -> str:
        return f"[{self.text}]" + f", of datatype {self.datatype}" * bool(self.datatype)


OUTPUTS: Mapping[str, OutputTensor] = {
    "output": OutputTensor("b,q,output_dim", "heads"),
    "attention_weights": OutputTensor("b,h,q,k", "scores"),
    "scores": OutputTensor("b,h,q,k", "scores", minus_infinity=True),
    "log_sum_exp": OutputTensor("b,h,q", "scores", minus_infinity=True),
    "query_projection": OutputTensor("b,h,q,head_dim", "projections"),
    "key_projection": OutputTensor("b,kv heads,k,head_dim", "projections"),
    "value_projection": OutputTensor("b,kv heads,k,value_head_dim", "projections"),
    "head_outputs": OutputTensor("b,h,q,value_head_dim", "heads"),
    "concatenated": OutputTensor("b,q,h * value_head_dim", "heads"),
    "indexer_mask": OutputTensor("b,q,k", "operator", "BOOL"),
    "latent": OutputTensor("b,k,key_value_rank", "operator"),
    "rope_key": OutputTensor("b,k,rope_key_dim", "operator"),
    "query_gradient": OutputTensor("b,q,query_dim", "gradients"),
    "key_gradient": OutputTensor("b,k,key_dim", "gradients"),
    "value_gradient": OutputTensor("b,k,value_dim", "gradients"),
}


def outputs_from(source: Source) -> tuple[str, ...]:
    """The names of the outputs that are computed from this."""
    return tuple(name for name, output in OUTPUTS.items() if output.source == source)
