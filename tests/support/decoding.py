"""One sequence with a KV cache, without a server: steps are prepared as the service prepares them, and compared with the reference."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from attend.attention import cache, decoding
from attend.attention.cache import KeyValueCache, PagePool, cached_tensors, follows_from_cache
from attend.attention.call import Result
from attend.attention.decoding import CachedForwardPass, forward_cached
from attend.attention.reference import forward
from attend.attention.reference.call import ReferenceCall
from attend.attention.reference.forward import Outputs
from attend.check.random_cases import FEATURES, REQUEST_FEATURES, Case, Draw, Sizes, draw_options, random_case, rounded
from attend.cli.server_check import compare_output, compared_outputs, largest_score
from attend.limits import ServingLimits
from attend.serving.admission import Admission
from attend.serving.casting import numpy_of
from attend.serving.layers.registry import LayerRegistry, LoadedLayer
from attend.serving.prepared import Prepared
from attend.serving.sessions.session import Session
from attend.serving.sessions.steps import STEP
from attend.tensors import Array
from attend.wire.codec import Decoded
from support.cases import weights_of
from support.waiting import PATIENCE

REGISTRY = LayerRegistry(torch.device("cpu"), ServingLimits())
LIMITS = Admission(ServingLimits())


class Sequence:
    """A session of one layer, the rows that it was sent, and the reference's answers to its steps."""

    def __init__(self, case: Case, pool: PagePool | None = None, layer: LoadedLayer | None = None) -> None:
        """`case`: its spec and weights are those of the layer; its request says whether steps have a key and a value."""
        self.case, self.spec = case, case.spec
        self.weights = weights_of(case)
        self.layer = layer or REGISTRY.make("layer", case.spec, case.weights)
        self.pool = pool or PagePool(torch.device("cpu"))
        self.session = Session("id", self.layer, KeyValueCache(case.spec, self.pool, "owner"), "owner", None, 300.0, 0.0)
        self.outputs = [name for name in compared_outputs(self.spec) if follows_from_cache(self.spec, name)]
        self.rows = {name: np.zeros((0, getattr(case.spec, f"{name}_dim"))) for name in ("key", "value") if self.has(name)}
        if not self.rows:
            self.rows = {"key": np.zeros((0, case.spec.query_dim))}
        self.key_positions = np.zeros((0, 1 if case.spec.coordinates is None else case.spec.coordinates.axes))

    @property
    def cache(self) -> KeyValueCache:
        return self.session.cache

    @property
    def length(self) -> int:
        return self.cache.length

    @property
    def room(self) -> int:
        """Number of rows that may be appended: a grid bounds the positions."""
        return 1000 if self.spec.grid_bias is None else self.spec.grid_bias.num_tokens - self.length

    def has(self, name: str) -> bool:
        """Whether steps have a key, or a value."""
        return name in self.case.request and (name == "key" or "value" in cached_tensors(self.spec))

    def draw(self, rng: np.random.Generator, queries: int, keys: int, *features: str, appended: int | None = None) -> dict[str, Any]:
        """The fields of a step with random rows. Without a key of its own, the step has as many new keys as queries."""
        spec, keys = self.spec, keys if self.has("key") else queries
        total = self.length + (keys if appended is None else appended)
        members: dict[str, Any] = {"query": rng.standard_normal((queries, spec.query_dim))}
        members |= {name: rng.standard_normal((keys, getattr(spec, f"{name}_dim"))) for name in ("key", "value") if self.has(name)}
        drawn = set(features) - ({"positions"} if spec.rope is None else set()) - {*spec.undefined_options}
        drawn = drawn - {"key", "value"} | ({"key"} if self.has("key") else set())
        drawn |= {operator.field for operator in spec.operators if operator.same_keys_for_all_heads}  # so that masks have no axis of heads
        sizes = Sizes(None, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_head_dim, queries, total)
        members |= draw_options(Draw(rng), sizes, drawn, spec)
        if "key_positions" in members:
            members["key_positions"] = members["key_positions"][:keys]
        if "query_offset" not in features:
            members.pop("query_offset", None)
        return {name: rounded(x, spec.dtype) if isinstance(x, np.ndarray) else x for name, x in members.items()}

    def look(self, rng: np.random.Generator, queries: int, *features: str) -> dict[str, Any]:
        """The fields of a call that appends nothing."""
        members = self.draw(rng, queries, 0, *features, appended=0)
        return {name: x for name, x in members.items() if name not in ("key", "value", "key_positions")} | {"append": False}

    def prepare(self, members: Mapping[str, Any], **fields: Any) -> Prepared:
        """The prepared call; its pages are reserved."""
        prepared = STEP.prepare_for_session(self.session, Decoded({"outputs": self.outputs, **members, **fields}), LIMITS)
        self.cache.reserve(prepared.call.masks.num_keys)
        return prepared

    def keep(self, members: Mapping[str, Any]) -> None:
        """Note the rows of a step that was computed."""
        key = members.get("key", members["query"])
        for name in self.rows:
            self.rows[name] = np.concatenate((self.rows[name], members.get(name, key)))
        positions = members.get("key_positions", None if "key" in members else members.get("positions"))
        if positions is None:
            positions = np.arange(len(self.key_positions), len(self.key_positions) + len(key))
        positions = np.reshape(positions, (len(key), -1))
        self.key_positions = np.concatenate((self.key_positions, np.broadcast_to(positions, (len(key), self.key_positions.shape[1]))))

    def truncate(self, length: int) -> None:
        """Roll back."""
        self.session.truncate(length)
        self.rows = {name: rows[:length] for name, rows in self.rows.items()}
        self.key_positions = self.key_positions[:length]

    def fork(self, length: int) -> "Sequence":
        """Another sequence with the first rows of this one."""
        fork = Sequence(self.case, self.pool, self.layer)
        self.session.require_visible(length, "/length")
        fork.session.cache = self.cache.fork(length)
        fork.rows = {name: rows[:length] for name, rows in self.rows.items()}
        fork.key_positions = self.key_positions[:length]
        return fork

    def expected(self, members: Mapping[str, Any], start: int) -> Outputs:
        """The reference's answer to a step, after `keep`, with all rows; `start` is the length before the step."""
        request = {name: x for name, x in members.items() if name not in ("append", "expected_length", "outputs")}
        request.setdefault("query_offset", start)
        if self.spec.rope is not None:
            keys = self.key_positions if self.spec.rope.num_axes > 1 else self.key_positions[:, 0]
            positions = np.arange(len(request["query"])) + _offset(request, len(keys))
            if self.spec.rope.num_axes > 1:
                positions = np.repeat(positions[:, None], self.spec.rope.num_axes, 1)
            request = {"positions": positions, **request, "key_positions": keys}
        return forward.attend(self.spec, self.weights, **{**request, **self.rows})

    def check(self, result: Result, members: Mapping[str, Any], start: int) -> None:
        """Assert that all outputs of a step that was computed are those of the reference; the rows that are freed are 0."""
        reference = self.expected(members, start)
        largest = largest_score(Case(self.spec, dict(members)), reference)
        for name, tensor in result.tensors.items():
            got, expected = numpy_of(tensor)[0], np.array(getattr(reference, name))
            if name in ("key_projection", "value_projection", "latent", "rope_key"):
                expected[..., : self.cache.first, :] = got[..., : self.cache.first, :] = 0
            error = compare_output(name, expected, got, self.spec, largest)
            assert error.agrees, (error, self.spec, {k: v for k, v in members.items() if np.size(v) < 9})
        assert result.fully_masked_rows == reference.fully_masked_rows

    def step(self, members: Mapping[str, Any]) -> Result:
        """Compute a step, check it, and free what the layer's window hides."""
        start, prepared = self.length, self.prepare(members)
        assert isinstance(prepared.operation, CachedForwardPass)
        (result,) = forward_cached(self.layer.attention, [(prepared.operation, prepared.call)])
        if members.get("append", True):
            self.keep(members)
        assert self.length == len(self.rows["key"])
        self.check(result, members, start)
        self.cache.free_hidden()
        return result


def _offset(request: Mapping[str, Any], keys: int) -> int:
    """The key position of the first query."""
    offset = request["query_offset"]
    if offset != "end":
        return int(offset)
    whole = ReferenceCall.from_fields(**{**request, "key": np.zeros((keys, 1)), "value": None})
    return int(whole.query_indices((1, 1, len(request["query"]), keys), True)[0, 0])


def random_sequence(rng: np.random.Generator, pool: PagePool | None = None, **knobs: Any) -> Sequence:
    """A sequence of a random layer."""
    knobs = {"features": FEATURES, "batched": False, "rate": rng.choice([0.15, 0.35]), **knobs}
    return Sequence(random_case(rng, **knobs), pool)


def random_step(sequence: Sequence, rng: np.random.Generator) -> dict[str, Any]:
    """A step with one row or several, and any fields of a request."""
    queries, keys = (int(n) for n in rng.choice([1, 1, 1, 2, 3, 5], 2))
    queries, keys = min(queries, sequence.room), min(keys, sequence.room)
    features = [name for name in REQUEST_FEATURES if rng.random() < 0.1]
    if sequence.length and rng.random() < 0.15:
        members = sequence.look(rng, queries, *features)
    else:
        members = sequence.draw(rng, queries, keys, *features)
    return members | {"outputs": ["output"]} if rng.random() < 0.5 else members  # one query then attends page by page


@contextmanager
def small_pages_of(size: int, first_rows: int = 2) -> Iterator[None]:
    """Caches that are created meanwhile have pages of `size` bytes, or of `first_rows` rows if these are more."""
    before = cache.FIRST_ROWS, cache.PAGE_BYTES
    cache.FIRST_ROWS, cache.PAGE_BYTES = first_rows, size
    try:
        yield
    finally:
        cache.FIRST_ROWS, cache.PAGE_BYTES = before


def rows_of(one: KeyValueCache) -> dict[str, Array]:
    """The rows that a cache has not freed."""
    return {name: numpy_of(tensor).copy() for name, tensor in one.joined(one.first).items()}


class Gate:
    """Steps that are computed alone wait until `opened` is set."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.entered, self.opened, real = threading.Semaphore(0), threading.Event(), decoding.forward_cached

        def forward_cached(*args: Any) -> Any:
            self.entered.release()
            assert self.opened.wait(PATIENCE)
            return real(*args)

        patch.setattr(decoding, "forward_cached", forward_cached)

    def wait(self) -> None:
        """Returns once a step waits."""
        assert self.entered.acquire(timeout=PATIENCE)
