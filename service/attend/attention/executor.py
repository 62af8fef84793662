"""Runs a layer's program with torch: what has no number for each pair of query and key at once, the rest for a block of rows at a time.

A block has at most MAX_BLOCK_SCORES scores, or one row, so [queries, keys] is stored only if it is a requested output. A kernel may compute
several steps as one (`kernels/`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attend.attention.dropout import Dropout
from attend.attention.masks import MaskBlock, Masks
from attend.attention.operators.step import Step
from attend.attention.program import INPUT_AXES, Program
from attend.attention.rows import block_of
from attend.attention.torch_arithmetic import TorchArithmetic

Values = dict[str, Any]  # by name: tensors, numbers, Masks, Dropout, or None


@dataclass(frozen=True)
class Plan:
    """The steps that compute the wanted values of a call, in the order in which they run."""

    wanted: frozenset[str]  # values, or steps: then what these write, before later steps replace it
    before: Program  # once
    block: Program  # for each block of rows
    after: Program  # once, with the rows of all blocks
    axes: Mapping[str, tuple[str, ...]]  # of all values
    results: tuple[str, ...]  # values of blocks that are wanted, or read after them

    @cached_property
    def all_heads(self) -> bool:
        """Whether steps of blocks need all heads."""
        return any(step.all_heads for step in self.block)

    @cached_property
    def reads(self) -> frozenset[str]:
        """The values that any step reads."""
        return frozenset(name for step in (*self.before, *self.block, *self.after) for name in step.reads)

    @cached_property
    def inputs(self) -> frozenset[str]:
        """The values that steps of blocks read and do not write first."""
        written, inputs = set[str](), set[str]()
        for step in self.block:
            inputs |= {name for name in step.reads if name not in written}
            written |= {*step.writes}
        return frozenset(inputs)


def axes_of(program: Sequence[Step], weights: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The axes of all values of a program; `weights` are those of weights, by canonical name."""
    axes = {name: tuple(text.split(",")) for name, text in INPUT_AXES.items()} | dict(weights)
    return axes | {name: tuple(value.axes.split(",")) for step in program for name, value in step.writes.items()}


def plan_of(program: Sequence[Step], wanted: Collection[str], axes: dict[str, tuple[str, ...]]) -> Plan:
    """The plan of a program that computes the wanted values and nothing else; `axes` are those of all values."""
    before, block, after, of_blocks = list[Step](), list[Step](), list[Step](), set[str]()
    for step in program:
        if any({"q", "k"} <= {*axes.get(name, ())} for name in (*step.reads, *step.writes)):
            assert not {*step.reads} & {name for late in after for name in late.writes}, f"{step.name} needs all rows of an earlier block"
            block.append(step)
            of_blocks |= {*step.writes}
        elif of_blocks & {*step.reads}:
            after.append(step)
            of_blocks |= {*step.writes}
        else:
            before.append(step)
    later = {*wanted, *(name for step in after for name in step.reads)}
    results = dict.fromkeys(name for step in block for name in step.writes if name in later)
    for step in block:
        if step.name in wanted and step.name not in step.writes:
            results[step.name] = None
            axes[step.name] = axes[next(iter(step.writes))]
    return Plan(frozenset(wanted), tuple(before), tuple(block), tuple(after), axes, tuple(results))


def run_steps(m: TorchArithmetic, steps: Iterable[Step], values: Values, wanted: Collection[str] = ()) -> None:
    """Add what the steps write to the values; of a wanted step a copy under its own name, since later steps may overwrite it."""
    for step in steps:
        result = step.compute(m, *[values[name] for name in step.reads])
        if len(step.writes) == 1:
            (name,) = step.writes
            values[name] = result
        else:
            values.update(zip(step.writes, result, strict=True))
        if step.name in wanted and step.name not in step.writes:
            values[step.name] = values[next(iter(step.writes))].clone()


@dataclass(frozen=True)
class Selection:
    """The heads and queries whose weights are computed; None: all."""

    heads: Sequence[int] | None = None
    queries: Sequence[int] | None = None

    def of(self, value: Any, axes: Sequence[str], heads: int) -> Any:
        """The selected rows of a value with these axes, of a layer with so many heads. Each selected head has a key head of its own."""
        if isinstance(value, Masks):
            return value.select(self.heads, self.queries)
        if not isinstance(value, Tensor):
            return value
        for axis, name in enumerate(axes[: value.ndim]):
            indices = self.queries if name == "q" else self.heads if name in ("h", "heads", "kv heads") else None
            if indices is None or (value.shape[axis] == 1 and name != "kv heads"):
                continue
            groups = heads // value.shape[axis] if name == "kv heads" else 1
            value = value.index_select(axis, torch.tensor([i // groups for i in indices], device=value.device))
        return value


def _value_of_block(value: Any, axes: Sequence[str], rows: slice, keys: slice) -> Any:
    """A value of a call as the steps of a block read it."""
    if isinstance(value, Masks):
        return MaskBlock(value, rows, keys)
    if isinstance(value, Dropout):
        return value.kept(rows)
    return block_of(value, axes, rows, keys) if isinstance(value, Tensor) else value


def run_blocks(
    m: TorchArithmetic, plan: Plan, values: Values, blocks: Iterable[slice], keys_of: Callable[[slice], slice]
) -> Iterator[tuple[slice, Values]]:
    """Yield the values of each block of rows, with the keys that it needs. A caller that drops them needs memory for one block only."""
    inputs = {name: values[name] for name in plan.inputs if name in values}
    for rows in blocks:
        keys = keys_of(rows)
        block = {name: _value_of_block(value, plan.axes.get(name, ()), rows, keys) for name, value in inputs.items()}
        run_steps(m, plan.block, block, plan.wanted)
        yield rows, block


class Assembly:
    """Assembles tensors from blocks of rows. A block with all rows is stored without a copy."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.tensors: dict[str, Tensor] = {}

    def put(self, name: str, axis: int, rows: slice, x: Tensor) -> None:
        """Add these rows x of a tensor, which are on this axis, or are all the same on an axis of 1."""
        if x.shape[axis] != (count := rows.stop - rows.start):
            x = x.expand(_with_length(x, axis, count))
        if count == self.num_rows:
            self.tensors[name] = x
            return
        if name not in self.tensors:
            self.tensors[name] = x.new_empty(_with_length(x, axis, self.num_rows))
        self.tensors[name].narrow(axis, rows.start, count).copy_(x)


def _with_length(x: Tensor, axis: int, length: int) -> list[int]:
    """The shape of x with another length of one axis."""
    shape = list(x.shape)
    shape[axis] = length
    return shape
