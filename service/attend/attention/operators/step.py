"""`Step`: one step of a layer's computation, a pure function of named arrays; and the arithmetic that steps are written in.

A layer is an ordered tuple of steps (`attention/program.py`). Values have names, such as `scores`, and axes, such as `b,h,q,k`: b batch
items, h heads, q queries, k keys; other axes have the names of widths. An axis of length 1 is broadcast. A step may replace a value that
an earlier one wrote.

A step gets an `Arithmetic`, and the values that it reads: NumPy arrays in float64, or torch tensors. NumPy and torch share most names of
functions and methods, and torch takes NumPy's `axis` and `keepdims`, so one body serves both. What they do not share, or what is fast in
torch only if it is written otherwise, is a method of `Arithmetic`, which each of the two implements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class Value(NamedTuple):
    """What a step writes: its axes, and its datatype, "" for that of the layer or of scores.

    An axis such as `k / block_size` has that many numbers, rounded up. One with a `?` has at most that many, and at most q + k: how many
    depends on the numbers of the call.
    """

    axes: str
    dtype: str = ""

    @property
    def output_axes(self) -> tuple[str, ...]:
        """Its axes as an output: those of batch items come first, although the value may be the same for all of them. The heads of several
        softmaxes are on one axis."""
        axes = tuple(axis for axis in self.axes.split(",") if axis != "b")
        return ("b", f"{axes[0]} * h", *axes[2:]) if axes[0].isdigit() and "h" in axes else ("b", *axes)

    @property
    def of_pairs(self) -> bool:
        """Whether it has a number for each query and key, so that it is computed for a block of rows at a time."""
        return {"q", "k"} <= {*self.axes.split(",")}

    @property
    def by_sequence(self) -> bool:
        """Whether each of several sequences in one query has its own: the output has no rows of queries or keys that follow each other."""
        return ("q" in self.output_axes) == ("k" in self.output_axes)

    @property
    def row_axis(self) -> int:
        """The axis of queries, or else of keys, of an output, counted from the end."""
        axes = self.output_axes
        return axes.index("q" if "q" in axes else "k") - len(axes)


# What several steps write.
PAIRS = "b,h,q,k"
SCORES, WEIGHTS, VISIBLE = {"scores": Value(PAIRS)}, {"attention_weights": Value(PAIRS)}, {"visible": Value(PAIRS, "bool")}
HEAD_OUTPUTS = {"head_outputs": Value("b,h,q,value_head_dim")}


def as_output(xp: Any, value: Any, axes: Sequence[str], lengths: Mapping[str, int]) -> Any:
    """A value of a call with the axes that it has as an output (`Value.output_axes`), in full. `lengths`: those of b, h, q and k."""
    array = xp.asarray(value, dtype=xp.float64) if isinstance(value, float) else value
    if "b" not in axes:
        array, axes = array.reshape(1, *(array.shape or (1,))), ("b", *axes)
    elif axes[0] != "b":
        array = xp.moveaxis(array, 0, 1)  # several softmaxes, whose heads follow each other
        array, axes = array.reshape(len(array), -1, *array.shape[3:]), ("b", "heads", *axes[3:])
    shape = tuple([lengths.get(name, n) for name, n in zip(axes, array.shape, strict=True)])
    return array if array.shape == shape else xp.broadcast_to(array, shape)


class Step(NamedTuple):
    """One step of a layer's program."""

    name: str
    reads: tuple[str, ...]  # values, or weights by their canonical names
    writes: Mapping[str, Value]
    formula: str
    compute: Callable[..., Any]  # (arithmetic, the values that it reads) -> the value, or a tuple in the order of `writes`
    all_keys: bool = False  # whether results for some of the keys depend on the others, so that calls cannot be cut along their keys
    all_heads: bool = False  # whether results for a head depend on other heads, so that none is computed alone
    signed: bool = False  # whether it may make attention weights negative
    empties: bool = False  # whether it may leave a row without a visible key
    products: tuple[str, ...] = ()  # axes whose lengths, multiplied, are its multiplications, such as `b,h,q,k,head_dim`
    scratch: tuple[str, ...] = ()  # axes of the numbers that it stores beside what it writes, in float64
    expands: bool = False  # whether a cache keeps what it reads in place of what it writes, which is larger


Steps = Mapping[str, tuple[Step, ...]]  # by the place in the program, of `attention/program.py`


class Arithmetic(Protocol):
    """What steps are written in, beside the functions that NumPy and torch have by one name. x [b, n, …] has rows, [b, heads, n, d] heads.

    Numbers are "narrow", in the layer's dtype, between steps up to the scores, and "wide", in float32 or float64, from there to the
    outputs of heads. In NumPy both are float64.
    """

    xp: Any  # the module numpy or torch

    def wide(self, x: Any) -> Any: ...
    def widened(self, x: Any) -> Any:
        """Wide, but for float64, which stays."""

    def narrow(self, x: Any) -> Any: ...
    def single(self, x: Any) -> Any:
        """In float32."""

    def like(self, x: Any, other: Any) -> Any:
        """In the datatype of `other`."""

    def exact(self, x: Any) -> Any:
        """In float64."""

    def integer(self, x: Any) -> Any:
        """Rounded towards 0, in int64."""

    def constant(self, numbers: Sequence[float]) -> Any:
        """Numbers in float64, on the device of the layer."""

    def counting(self, stop: int, like: Any) -> Any:
        """0, 1, …, stop - 1 in int64, on the device of `like`."""

    def weight(self, name: str) -> Any:
        """A weight by its canonical name; None if the layer does not have it."""

    def project(self, x: Any, name: str) -> Any:
        """x Wᵀ + b with the weight and bias `name`: [..., in] -> [..., out]."""

    def project_exactly(self, x: Any, name: str) -> Any:
        """The same in float64, from float64."""

    def split_heads(self, x: Any, heads: int) -> Any:
        """[b, n, heads * d] -> [b, heads, n, d]."""

    def merge_heads(self, x: Any) -> Any:
        """[b, heads, n, d] -> [b, n, heads * d]."""

    def share(self, x: Any, heads: int) -> Any:
        """A part of keys that all heads share, for each of them: [b, n, r] -> [b, heads, n, r]."""

    def scores(self, query: Any, key: Any, scale: float) -> Any:
        """scale · Q Kᵀ: [b, h, q, d], [b, kv heads, k, d] -> [b, h, q, k], wide. Each kv head is that of h / kv heads neighbours."""

    def where(self, condition: Any, x: Any, otherwise: float) -> Any:
        """x where a condition, broadcast to it, is true, and a number elsewhere."""

    def mask(self, scores: Any, visible: Any) -> Any:
        """The scores, which may be overwritten, with -inf where a key is not visible."""

    def softmax(self, scores: Any, fully_masked: Any) -> Any:
        """exp(s_j - max s) / Σ exp(s_j - max s); 0 in rows [b, h, q] that are fully masked (None: none are)."""

    def log_sum_exp(self, scores: Any) -> Any:
        """ln Σ_j exp(s_j): [..., k] -> [...]; -inf for rows of -inf."""

    def sigmoid(self, x: Any) -> Any: ...
    def softplus(self, x: Any) -> Any: ...

    def weighted_values(self, weights: Any, value: Any) -> Any:
        """Σ_j a_ij v_j: [b, h, q, k], [b, kv heads, k, d] -> [b, h, q, d], narrow. Terms with weight 0 are 0, even where v is NaN."""

    def gather(self, x: Any, index: Any) -> Any:
        """x at these indices of the last axis."""

    def select_by_index(self, query: Any, key: Any, factors: Any, visible: Any, n: int) -> Any:
        """Whether a key is visible and among the n visible ones with the largest Σ_h w_ih relu(q_ih · k_j); ties go to the lower key.

        float64 [b, heads, q, d], [b, k, d] and [b, q, heads], bool [b, 1, q, k] -> bool [b, 1, q, k].
        """

    def largest(self, x: Any, n: int) -> Any:
        """Whether a number is among the n largest of the last axis, where ties go to the lower index: bool. Any of the -inf may be, too."""
