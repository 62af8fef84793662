"""What follows from the fields of a spec: widths, weights, operators, the program, outputs. Tier 1."""

import math
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from operator import mul, sub
from typing import Any, Self

from attend.attention.operators import OPERATORS, OperatorFields, num_softmaxes
from attend.attention.operators.declarations import Coordinates, Extent, Interval
from attend.attention.operators.operator import Operator
from attend.attention.operators.step import Value
from attend.attention.program import OPTIONAL, Program, outputs_of, program_of
from attend.axes import GRADIENTS
from attend.spec_parts import PROJECTIONS

COMBINED: Mapping[str, Callable[[int, int], int]] = {  # lengths of axes such as `h * head_dim`
    " * ": mul,
    " - ": sub,
    " / ": lambda n, divisor: n if n < 0 else -(-n // divisor),  # n < 0: unknown
}


def is_of_calls(axis: str) -> bool:
    """Whether the length of an axis depends on the call."""
    return axis.startswith("?") or not {"b", "q", "k"}.isdisjoint(axis.split(" "))


class SpecProperties(OperatorFields):
    """A spec without the fields that no property depends on."""

    def projected_widths(self) -> dict[str, int]:
        """Projection -> width of all its heads; `output` is the width of the concatenated heads."""
        kv, heads = self.num_kv_heads, self.num_heads
        return {
            "query": heads * self.head_dim,
            "key": kv * self.head_dim,
            "value": kv * self.value_head_dim,
            "output": heads * self.value_head_dim,
        }

    @property
    def widest(self) -> int:
        """Largest width of an input, a projection or the output."""
        inputs, added = (
            (self.d_model, self.key_dim, self.value_dim, self.output_dim),
            (operator.widest(self) for operator in self.operators),
        )
        return max(*inputs, *self.projected_widths().values(), *added)

    @property
    def query_dim(self) -> int:
        """Width of the queries in requests."""
        return self.d_model if self.projections else self.num_heads * self.head_dim

    @cached_property
    def operators(self) -> tuple[type[Operator], ...]:
        """The operators of the layer."""
        return tuple(operator for operator in OPERATORS if operator.is_active(self))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other values of some fields, which are not validated. What is derived from them is derived again."""
        copied = super().model_copy(update=update, deep=deep)
        for name, attribute in vars(SpecProperties).items():
            if isinstance(attribute, cached_property):
                copied.__dict__.pop(name, None)
        return copied

    @property
    def num_softmaxes(self) -> int:
        """Number of softmaxes of each head, among which the numbers of its queries and keys are divided."""
        return num_softmaxes({operator.field for operator in self.operators})

    @cached_property
    def all_operators(self) -> tuple[type[Operator], ...]:
        """The operators of the layer, and those that calls may ask for."""
        return tuple(operator for operator in OPERATORS if operator.of_calls or operator in self.operators)

    @cached_property
    def program(self) -> Program:
        """The steps of a call that asks for nothing that the layer does not have."""
        return program_of(self, self.features)

    @property
    def features(self) -> set[str]:
        """The features, for `program_of`, of a call that asks for nothing that the layer does not have."""
        own = {operator.field for operator in self.operators if operator.of_calls}
        return own | ({"intervals"} if any(map(str, self.intervals)) else set())

    def implied_features(self, num_keys: int) -> frozenset[str]:
        """The features of calls with so many keys that follow from the fields of the layer."""
        return frozenset().union(*(operator.implied_features(self, num_keys) for operator in self.operators))

    @cached_property
    def signed_weights(self) -> str:
        """The field that makes attention weights negative, with any sum; "" if none does."""
        return next((operator.field for operator in self.operators if any(step.signed for step in operator.own_steps(self))), "")

    @cached_property
    def undefined_options(self) -> dict[str, str]:
        """Fields of requests that the layer refuses -> why."""
        return {name: reason for operator in self.operators for name, reason in operator.undefined_options.items()}

    @property
    def positional(self) -> str:
        """The first field that makes results depend on the positions of queries and keys, "" if there is none."""
        return next((operator.field for operator in self.operators if operator.positional), "")

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """The keys that each operator leaves to a query."""
        return tuple(operator.interval(self) for operator in self.operators)

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The positions that queries and keys may have, by each operator that has a bound."""
        return tuple(extent for operator in self.operators if (extent := operator.extent(self)) is not None)

    @property
    def coordinates(self) -> Coordinates | None:
        """What calls have in the field `positions`; None: they have none."""
        return next((found for operator in self.operators if (found := operator.coordinates(self)) is not None), None)

    @property
    def normalises_heads(self) -> bool:
        """Whether queries and keys do not grow with their inputs."""
        return any(operator.normalises_heads for operator in self.operators)

    @property
    def is_relative(self) -> bool:
        """Whether results depend on differences of positions only."""
        return all(operator.is_relative(self) for operator in self.operators)

    @cached_property
    def splits_over_keys(self) -> bool:
        """Whether the result of a call follows from those of parts that have some of its keys each, numbered from 0."""
        return self.is_relative and not any(step.all_keys for step in self.program)

    @cached_property
    def reads_hidden_keys(self) -> bool:
        """Whether results depend on keys that are masked for every query: they are neither left out of calls nor freed in caches."""
        return any(step.expands and step.all_keys for step in self.program)

    def outputs(self, features: Collection[str] = ()) -> Mapping[str, Value]:
        """What calls with these features beside the layer's own may ask for, gradients aside, with the axes of each output."""
        return outputs_of(self, frozenset({*self.features, *features}))

    @cached_property
    def every_output(self) -> Mapping[str, Value]:
        """Every output that some call may ask for."""
        return {**self.outputs(OPTIONAL), **{name: Value(axes) for name, axes in GRADIENTS.items()}}

    def output_shape(self, name: str, b: int, q: int, k: int) -> tuple[int, ...]:
        """The shape of an output for b items of q queries and k keys, -1 for unknown numbers, without a selection."""
        lengths = {"b": b, "q": q, "k": k}
        axes = self._axes_of_outputs[name]
        return tuple([axis if isinstance(axis, int) else lengths.get(axis) or self.length_of(axis, lengths) for axis in axes])

    @cached_property
    def _axes_of_outputs(self) -> Mapping[str, tuple[int | str, ...]]:
        """The axes of each output, those as lengths that are the same in all calls."""
        every = {name: value.output_axes for name, value in self.every_output.items()}
        return {name: tuple(axis if is_of_calls(axis) else self.length_of(axis) for axis in axes) for name, axes in every.items()}

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of every weight. A projection is applied as `x @ W.T + b`, so W is [out, in]."""
        shapes: dict[str, tuple[int, ...]] = {}
        widths = self.projected_widths()
        ins = {"query": self.d_model, "key": self.key_dim, "value": self.value_dim, "output": widths["output"]}
        for name in PROJECTIONS if self.projections else ():
            out = self.output_dim if name == "output" else widths[name]
            shapes[f"{name}.weight"] = (out, ins[name])
            if self.has_bias(name):
                shapes[f"{name}.bias"] = (out,)
        for operator in self.operators:
            shapes |= operator.weights(self)
        return shapes

    def length_of(self, axis: str, lengths: Mapping[str, int] = {}) -> int:
        """The length of an axis of a value (`Value`), such as `h`, `head_dim` or a width of an operator; those of a call are `lengths`."""
        known = {"h": self.num_heads, "kv heads": self.num_kv_heads, **lengths}
        if axis in known or axis.isdigit():
            return known[axis] if axis in known else int(axis)
        if axis.startswith("?"):
            return min(self.length_of(axis[1:], lengths), lengths["q + k"])
        for sign, combined in COMBINED.items():
            if sign in axis:
                return combined(*(self.length_of(one, lengths) for one in axis.split(sign)))
        parts = (self, *(getattr(self, operator.field) for operator in self.operators))
        return next(int(getattr(part, axis)) for part in parts if hasattr(part, axis))

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.weight_shapes().values())
