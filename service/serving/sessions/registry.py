"""A session, and the registry of the sessions of one process: their memory, their owners, and when they end.

A session belongs to the API key that created it; without keys, all belong to one owner. It ends when it is deleted or idle, when its layer
is replaced or removed, or when its owner needs memory for another one: then the owner's least recently used session ends first. It never
ends because another owner needs memory; so with keys, no owner may take all of it.
"""

import asyncio
import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from service.attention.cache import KeyValueCache, Page, PagePool, first_visible
from service.errors import (
    InvalidRequest,
    LengthMismatch,
    OutOfMemory,
    Problem,
    SessionConflict,
    SessionEnded,
    SessionNotFound,
    WrongReplica,
)
from service.serving.executor import error_of_batch
from service.serving.layers.registry import LayerRegistry, LoadedLayer
from service.serving.metrics import Metrics
from service.serving.sessions.placement import RESTARTED, Place, Workers, make_id, place_of
from service.wire.schemas.document import LayerReference
from service.wire.schemas.sessions import PostSession, SessionDocument

Reason = Literal["idle", "memory", "layer_replaced", "layer_removed", "deleted"]
MEANINGS: dict[str, str] = {
    "idle": "it was idle for longer than its idle_seconds",
    "memory": "a session of the same owner needed its memory",
    "layer_replaced": "its layer was replaced",
    "layer_removed": "its layer was removed or unloaded",
    "deleted": "it was deleted",
}
SHARE_OF_FREE = 2  # with API keys, an owner may use at most SHARE_OF_FREE times the bytes that stay free
MAX_SESSIONS = 10_000  # of one process; ending all of them takes tens of milliseconds
MAX_ENDED = 10_000  # ended sessions whose reasons are kept
SWEEP_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class Session:
    """One sequence and the rows that its layer has projected. Calls to it run one after the other, in the order in which they arrive."""

    id: str
    layer: LoadedLayer
    cache: KeyValueCache
    owner: str
    capacity: int | None
    idle_seconds: float
    used_at: float
    sequence: tuple[str, ...] | None = None  # owner, layer and id of the sequence of the Open Inference Protocol that it is
    calls: int = 0  # number of calls that use it or wait for it
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # of the call that uses it

    @property
    def length(self) -> int:
        return self.cache.length

    def require_length(self, expected: int | None) -> None:
        """Raises LengthMismatch if the session has another number of rows."""
        if expected is not None and expected != self.length:
            problem = Problem("/expected_length", str(self.length), str(expected))
            raise LengthMismatch(f"expected {self.length}, the length of the session, got {expected}, at /expected_length", [problem])

    def truncate(self, length: int) -> None:
        """Keep the first `length` rows. Raises InvalidRequest, or SessionConflict if rows that later queries need are freed."""
        if length > self.length:
            raise InvalidRequest.where("/length", f"at most {self.length}, the length of the session", str(length))
        if length < self.length:
            if length:
                self.require_visible(length, "/length")
            self.cache.truncate(length)

    def require_visible(self, position: int, at: str) -> None:
        """Raises SessionConflict if a query at this position sees rows that are freed."""
        first, spec = self.cache.first, self.layer.spec
        if first <= first_visible(spec, position):
            return
        lowest = bisect_left(range(self.length), first, key=lambda n: first_visible(spec, n))
        raise SessionConflict.where(
            at, f"at least {lowest}, since the first {first} rows are freed, which the layer's window or chunks hide", str(position)
        )


class SessionRegistry:
    """Id -> session. All methods run on the event loop."""

    def __init__(
        self,
        layers: LayerRegistry,
        metrics: Metrics,
        capacity: int,
        place: Place,
        shared: bool,
        clock: Callable[[], float] = time.monotonic,
        workers: Workers | None = None,
    ) -> None:
        """`capacity`: bytes of all pages; `shared`: whether there are several owners, of whom none may use all of them; `workers`: None if
        this is the only process."""
        self.layers, self.metrics, self.capacity, self.place, self.shared, self.clock = layers, metrics, capacity, place, shared, clock
        self.workers = workers
        self.pool = PagePool(layers.device)
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # least recently used first
        self._counts: Counter[str] = Counter()  # owner -> number of its sessions
        self._ended: OrderedDict[str, tuple[str, Reason]] = OrderedDict()  # id -> owner, reason; oldest first
        self.sequences: dict[tuple[str, ...], str] = {}  # owner, layer and id of a sequence -> id of its session
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def __getitem__(self, session_id: str) -> Session:
        return self._sessions[session_id]

    def create(self, document: PostSession, owner: str) -> Session:
        """A new session without rows. Raises LayerNotFound, LayerUnloaded, InvalidRequest or OutOfMemory."""
        layer = self.layers.find(document.layer)
        self._require_room(owner)
        return self._add(layer, KeyValueCache(layer.spec, self.pool, owner), document.capacity, document.idle_seconds)

    def fork(self, session: Session, length: int | None) -> Session:
        """A new session with the first `length` rows of another, in the same pages."""
        length = session.length if length is None else length
        if length > session.length:
            raise InvalidRequest.where("/length", f"at most {session.length}, the length of the session", str(length))
        session.require_visible(length, "/length")
        self._require_room(session.owner)
        return self._add(session.layer, session.cache.fork(length), session.capacity, session.idle_seconds)

    def _require_room(self, owner: str) -> None:
        """End the owner's least recently used session if there may be no more sessions. Raises OutOfMemory if none can be ended."""
        free = MAX_SESSIONS - len(self._sessions)
        is_full = free <= 0 or (self.shared and self._counts[owner] >= SHARE_OF_FREE * free)
        if is_full and not self._evict(owner):
            raise OutOfMemory(f"there are {len(self._sessions)} sessions, of at most {MAX_SESSIONS}")

    def _add(self, layer: LoadedLayer, cache: KeyValueCache, capacity: int | None, idle_seconds: float) -> Session:
        session = Session(make_id(self.place), layer, cache, cache.owner, capacity, idle_seconds, self.clock())
        self._sessions[session.id] = session
        self._counts[session.owner] += 1
        if self._timer is None:
            self._sweep()
        return session

    def require_here(self, session_id: str) -> None:
        """Raises SessionNotFound, WrongReplica, WrongWorker, or SessionEnded if this process is not the one that has the session."""
        if session_id in self._sessions:
            return
        place = place_of(session_id)
        if place.replica != self.place.replica:
            own = self.place.replica
            raise WrongReplica(f"replica {place.replica} has this session, and this is {own}; a balancer has to send its requests there")
        if self.workers is not None:
            self.workers.require_session(place)
        elif place != self.place:
            raise SessionEnded(RESTARTED)

    def find(self, session_id: str, owner: str) -> Session:
        """The owner's session of that id. Raises SessionNotFound, SessionEnded, WrongReplica or WrongWorker."""
        if (session := self._sessions.get(session_id)) is not None and session.owner == owner:
            self._follow_layer(session)
        if (session := self._sessions.get(session_id)) is not None and session.owner == owner:
            return session
        self.require_here(session_id)
        known, reason = self._ended.get(session_id, (None, None))
        if session is not None or (known is not None and known != owner):
            raise SessionNotFound.where("", "the id of a session of this API key", "that of another one")
        raise SessionEnded("the session has ended" + (f": {MEANINGS[reason]}" if reason is not None else ""))

    def of_owner(self, owner: str) -> list[Session]:
        """The owner's sessions, least recently used first."""
        return [session for session in self._sessions.values() if session.owner == owner]

    def release(self, session: Session) -> None:
        """A call to the session has ended."""
        session.calls -= 1
        if session.id in self._sessions:
            session.used_at = self.clock()
            self._sessions.move_to_end(session.id)
        elif not session.calls:
            session.cache.close()

    def reserve(self, cache: KeyValueCache, stop: int) -> None:
        """Create the pages of rows up to `stop`; end sessions of the same owner for them that are not in use, if necessary.

        Raises OutOfMemory.
        """
        owner, size = cache.owner, cache.missing_bytes(stop)
        if not size:
            return
        if self._shortage(owner, size) is not None:
            problem = self._shortage(owner, size - self._evictable(owner, cache))
            if problem is not None:  # no session ends if that would not free enough
                raise OutOfMemory(problem)
        while (problem := self._shortage(owner, cache.missing_bytes(stop))) is not None:
            if not self._evict(owner, cache):
                raise OutOfMemory(problem)
        try:
            cache.reserve(stop)
        except Exception as error:
            raise error_of_batch(error) from None

    def end(self, session: Session, reason: Reason) -> None:
        """End a session. Its memory is free afterwards, or once the call that uses it is done."""
        if self._sessions.pop(session.id, None) is None:
            return
        self._counts[session.owner] -= 1
        if session.sequence is not None and self.sequences.get(session.sequence) == session.id:
            del self.sequences[session.sequence]
        self._ended[session.id] = session.owner, reason
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        self.metrics.count_ended_session(reason)
        if not session.calls:
            session.cache.close()

    def document(self, session: Session) -> SessionDocument:
        """The description of a session."""
        left = session.used_at + session.idle_seconds - self.clock()
        return SessionDocument(
            id=session.id,
            layer=LayerReference(name=session.layer.name, fingerprint=session.layer.fingerprint),
            length=session.length,
            capacity=session.capacity,
            bytes=session.cache.size,
            idle_seconds=session.idle_seconds,
            expires_at=datetime.fromtimestamp(time.time() + left, UTC).isoformat(timespec="seconds"),
        )

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _shortage(self, owner: str, size: int) -> str | None:
        """Why the owner's sessions may not take `size` more bytes; None if they may."""
        free = self.capacity - self.pool.used - size
        if free < 0:
            share = "session_memory" if self.workers is None else f"session_memory / {self.workers.count} workers"
            return f"the pages of all sessions of a process may have {self.capacity} bytes ({share}), and {-free} more would be needed"
        taken = self.pool.of_owner[owner] + size
        if self.shared and size and taken > SHARE_OF_FREE * free:
            return f"the sessions of one API key may have {SHARE_OF_FREE} times the free bytes (session_memory)"
        return None

    def _evictable(self, owner: str, cache: KeyValueCache) -> int:
        """Bytes of the owner's pages that only sessions have that are not in use, apart from those of `cache`."""
        return self.pool.of_owner[owner] - sum(page.size for page in self._pages_in_use(owner, cache).values())

    def _pages_in_use(self, owner: str, *caches: KeyValueCache) -> dict[int, Page]:
        """The pages of these caches, and of the owner's sessions that are in use, each once."""
        used = [*caches, *(session.cache for session in self._sessions.values() if session.owner == owner and session.calls)]
        return {id(page): page for cache in used for page in cache.pages}

    def _evict(self, owner: str, cache: KeyValueCache | None = None) -> bool:
        """End the owner's least recently used session that is not in use. Returns whether there was one.

        For pages of `cache`, it must have pages that neither `cache` nor a session in use has.
        """
        unused = [session for session in self._sessions.values() if session.owner == owner and not session.calls]
        if cache is not None:
            kept = self._pages_in_use(owner, cache)
            unused = [session for session in unused if any(id(page) not in kept for page in session.cache.pages)]
        if not unused:
            return False
        self.end(unused[0], "memory")
        return True

    def _follow_layer(self, session: Session) -> None:
        """End the session if its layer is no longer served. An equal layer in its place becomes that of the session."""
        layer = self.layers.get(session.layer.name)
        if layer is None:
            self.end(session, "layer_removed")
        elif layer.fingerprint != session.layer.fingerprint:
            self.end(session, "layer_replaced")
        else:
            session.layer = layer

    def _sweep(self) -> None:
        """End idle sessions, and those without a layer; once a second while there are any."""
        now = self.clock()
        for session in list(self._sessions.values()):
            if session.calls:
                continue
            if session.used_at + session.idle_seconds <= now:
                self.end(session, "idle")
            else:
                self._follow_layer(session)
        self._timer = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep) if self._sessions else None
