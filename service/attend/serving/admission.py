"""Decides which calls are admitted: those whose predicted cost (`cost.py`) is within the limits of the server."""

from bisect import bisect_left
from dataclasses import replace
from typing import NamedTuple

from attend.attention.call import CallOptions
from attend.errors import Problem, TooLarge
from attend.limits import ServingLimits
from attend.serving.cost import Cost, predict_call
from attend.spec import LayerSpec
from attend.wire.schemas.attend import ReplyOptions

LARGE_REPLY = "a reply of at most {} predicted bytes (max_reply_bytes); ask for fewer outputs, or in binary"
MAX_BATCH = 2**31 - 1  # the largest value that `largest_batch` returns


class Admission(NamedTuple):
    """Admits calls within `limits`, and with `shards` processes also calls that are within them once they are cut into so many parts."""

    limits: ServingLimits
    shards: int = 0

    def refusals(self, cost: Cost, may_be_cut: bool = False) -> tuple[list[Problem], bool]:
        """The exceeded limits (empty if the call is admitted), and whether the call is admitted only in parts, one for each shard.

        `may_be_cut`: whether shards may compute it. One process assembles the reply, so the bounds on scores, items and reply bytes hold
        for the whole call.
        """
        problems = exceeded_limits(cost, self.limits)
        if not problems or self.shards < 2 or not may_be_cut:
            return problems, False
        return (problems, False) if exceeded_limits(cost_of_part(cost, self.shards), self.limits) else ([], True)

    def require(self, cost: Cost, may_be_cut: bool = False) -> bool:
        """Whether the call is admitted only in parts. Raises TooLarge if it is not admitted."""
        problems, in_parts = self.refusals(cost, may_be_cut)
        if problems:
            raise TooLarge(problems=problems)
        return in_parts


def exceeded_limits(cost: Cost, limits: ServingLimits) -> list[Problem]:
    """The limits that a call of this cost exceeds."""
    table = (
        (cost.output_scores, limits.max_scores, "", "at most {} weights and scores (max_scores); select fewer heads or queries"),
        (cost.memory_bytes, limits.max_memory_bytes, "", "at most {} bytes of predicted memory (max_memory_bytes)"),
        (cost.operations, limits.max_operations, "", "at most {} predicted operations (max_operations)"),
        (cost.items, limits.max_batch_items, "/query", "at most {} batch items, or sequences in one query (max_batch_items)"),
        (cost.pairs, limits.max_pairs, "", "at most {} heads x queries x keys (max_pairs)"),
        (cost.reply_bytes, limits.max_reply_bytes, "", LARGE_REPLY),
    )
    return [Problem(at, expected.format(limit), str(value)) for value, limit, at, expected in table if value > limit]


def cost_of_part(cost: Cost, shards: int) -> Cost:
    """The cost of one part of a call that is cut into `shards` parts."""
    work = {name: -(-getattr(cost, name) // shards) for name in ("operations", "memory_bytes", "pairs")}
    return replace(cost, **work)


def largest_batch(spec: LayerSpec, limits: ServingLimits) -> int:
    """The most batch items that are admitted in a call with one query, one key and the default outputs; at least 1."""
    outputs, reply = ("output", "attention_weights"), ReplyOptions()
    one = CallOptions(1, 1, 1, frozenset(outputs), spec.scale)

    def is_refused(b: int) -> bool:
        return bool(exceeded_limits(predict_call(replace(one, items=b), outputs, reply, spec), limits))

    return bisect_left(range(2, min(limits.max_batch_items, MAX_BATCH) + 1), True, key=is_refused) + 1
