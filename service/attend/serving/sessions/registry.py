"""The registry of the sessions of one process: their memory, their owners, and when they end.

A session belongs to the API key that created it; without keys, all belong to one owner. It ends when it is deleted or idle, when its layer
is replaced or removed, or when its owner needs memory for another one: then the owner's least recently used session ends first. It never
ends because another owner needs memory; so with keys, no owner may take all of it.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Literal

from attend.attention.cache import KeyValueCache, Page, PagePool
from attend.errors import (
    InvalidRequest,
    OutOfMemory,
    Overloaded,
    Problem,
    SessionEnded,
    SessionNotFound,
    WrongReplica,
)
from attend.serving.byte_budget import MAX_RETRY_AFTER
from attend.serving.fair_share import FairShare, Shortage, shortage
from attend.serving.faults import error_of_batch
from attend.serving.layers.registry import LayerRegistry, LoadedLayer
from attend.serving.metrics import Metrics
from attend.serving.sessions.ids import Process, make_id, process_of
from attend.serving.sessions.session import SequenceKey, Session
from attend.wire.problems import describe_value
from attend.wire.schemas.schema import LayerReference
from attend.wire.schemas.sessions import PostSession, SessionInfo

Reason = Literal["idle", "memory", "layer_replaced", "layer_removed", "deleted"]
MEANINGS: dict[str, str] = {
    "idle": "it was idle for longer than its idle_seconds",
    "memory": "a session of the same owner needed its memory",
    "layer_replaced": "its layer was replaced",
    "layer_removed": "its layer was removed or unloaded",
    "deleted": "it was deleted",
}
SHARE_OF_FREE = 2  # with API keys, an owner may use at most SHARE_OF_FREE times the bytes that stay free
MAX_SESSIONS = 10_000  # of one process
SESSIONS_AT_ONCE = 100  # sessions that are ended or examined before the event loop does other work; they take about a millisecond
MAX_ENDED = 10_000  # ended sessions whose reasons are kept
SWEEP_SECONDS = 1.0


class _OwnedSessions:
    """The sessions of one owner by id, least recently used first: all, those that calls use or wait for, and the others."""

    def __init__(self) -> None:
        self.sessions: OrderedDict[str, Session] = OrderedDict()
        self.in_use: dict[str, Session] = {}
        self.unused: OrderedDict[str, Session] = OrderedDict()


class SessionRegistry:
    """Id -> session. All methods run on the event loop."""

    def __init__(
        self,
        layers: LayerRegistry,
        metrics: Metrics,
        capacity: int,
        process: Process,
        several_owners: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`capacity`: bytes of all pages; `several_owners`: whether there may be several, of whom none may use all of them."""
        self.layers, self.metrics, self.capacity, self.process, self.clock = layers, metrics, capacity, process, clock
        self.several_owners = several_owners
        self.pool = PagePool(layers.device)
        self._sessions: dict[str, Session] = {}
        least = 1 if several_owners else MAX_SESSIONS
        self._numbers = FairShare[str](MAX_SESSIONS, SHARE_OF_FREE, least=least)  # of sessions of each owner
        self._owners: dict[str, _OwnedSessions] = {}  # owners that have sessions
        self._ended: OrderedDict[str, tuple[str, Reason]] = OrderedDict()  # id -> owner, reason; oldest first
        self._sequences: dict[SequenceKey, Session] = {}
        self._sweeping: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def __getitem__(self, session_id: str) -> Session:
        return self._sessions[session_id]

    def create(self, body: PostSession, owner: str) -> Session:
        """A new session without rows. Raises LayerNotFound, LayerUnloaded, InvalidRequest or Overloaded."""
        layer = self.layers.find(body.layer, at="/layer")
        self._require_room(owner)
        return self._add(layer, KeyValueCache(layer.spec, self.pool, owner), body.capacity, body.idle_seconds)

    def fork(self, session: Session, length: int | None) -> Session:
        """A new session with the first `length` rows of another, in the same pages."""
        length = session.length if length is None else length
        if length > session.length:
            raise InvalidRequest.where("/length", f"at most {session.length}, the length of the session", str(length))
        session.require_visible(length, "/length")
        self._require_room(session.owner)
        return self._add(session.layer, session.cache.fork(length), session.capacity, session.idle_seconds)

    def of_sequence(self, key: SequenceKey) -> Session | None:
        """The session of a sequence of the Open Inference Protocol; None if none has begun, or it has ended."""
        return self._sequences.get(key)

    def begin_sequence(self, key: SequenceKey, body: PostSession) -> Session:
        """A new session, which is that of the sequence from now on. Raises what `create` raises."""
        session = self.create(body, key[0])
        session.sequence, self._sequences[key] = key, session
        return session

    def resume_sequence(self, session: Session) -> None:
        """Make a session that has not ended that of its sequence again."""
        if session.sequence is not None and session.id in self._sessions:
            self._sequences[session.sequence] = session

    def _require_room(self, owner: str) -> None:
        """End the owner's least recently used session if there may be no more sessions. Raises Overloaded if none can be ended."""
        if self._numbers.shortage(owner, 1) is None:
            return
        if owner not in self._owners or not (unused := self._owners[owner].unused):
            raise Overloaded(MAX_RETRY_AFTER, problems=[Problem("", f"at most {MAX_SESSIONS} sessions in one process", "one more")])
        self.end(next(iter(unused.values())), "memory")

    def _add(self, layer: LoadedLayer, cache: KeyValueCache, capacity: int | None, idle_seconds: float) -> Session:
        session = Session(make_id(self.process), layer, cache, cache.owner, capacity, idle_seconds, self.clock())
        self._sessions[session.id] = session
        self._numbers.take(session.owner, 1)
        owned = self._owners.setdefault(session.owner, _OwnedSessions())
        owned.sessions[session.id] = owned.unused[session.id] = session
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().create_task(self._sweep_regularly())
        return session

    def _require_own(self, session_id: str, at: str, problems: Sequence[Problem]) -> None:
        """Raises SessionNotFound, or with the problems WrongReplica or SessionEnded, if this process has not made the id."""
        process, own = process_of(session_id, at), self.process
        if process.replica != own.replica:
            moved = f"replica {process.replica} has this session, and this is {own.replica}; a balancer has to send its requests there"
            raise WrongReplica(moved, problems)
        if process != own:
            raise SessionEnded("the session has ended: its process was restarted", problems)

    def find(self, session_id: str, owner: str, at: str = "") -> Session:
        """The owner's session of that id. Raises SessionNotFound, SessionEnded or WrongReplica. `at`: where the body has the id."""
        if (session := self._sessions.get(session_id)) is not None and session.owner == owner:
            self._follow_layer(session)
        if (session := self._sessions.get(session_id)) is not None and session.owner == owner:
            return session
        # of an id in the path the detail says more
        problems = [Problem(at, "the id of a session that this server keeps", describe_value(session_id))] if at else []
        self._require_own(session_id, at, problems)
        known, reason = self._ended.get(session_id, (None, None))
        if session is not None or (known is not None and known != owner):
            raise SessionNotFound.where(at, "the id of a session of this API key", "that of another one")
        raise SessionEnded("the session has ended" + (f": {MEANINGS[reason]}" if reason is not None else ""), problems)

    def of_owner(self, owner: str) -> list[Session]:
        """The owner's sessions, least recently used first."""
        owned = self._owners.get(owner)
        return [] if owned is None else list(owned.sessions.values())

    async def infos_of_owner(self, owner: str) -> list[SessionInfo]:
        """Descriptions of the owner's sessions, least recently used first. The event loop does other work after each SESSIONS_AT_ONCE."""
        sessions, infos = iter(self.of_owner(owner)), list[SessionInfo]()
        while some := list(islice(sessions, SESSIONS_AT_ONCE)):
            infos += [self.info_of(session) for session in some if session.id in self._sessions]
            await asyncio.sleep(0)
        return infos

    def use(self, session: Session) -> None:
        """A call uses the session, or waits for it: it does not end for lack of memory until `release`."""
        session.calls += 1
        if session.id in self._sessions:
            owned = self._owners[session.owner]
            owned.unused.pop(session.id, None)
            owned.in_use[session.id] = session

    def release(self, session: Session) -> None:
        """A call to the session has ended."""
        session.calls -= 1
        if session.id in self._sessions:
            session.used_at = self.clock()
            owned = self._owners[session.owner]
            owned.sessions.move_to_end(session.id)
            if not session.calls:
                owned.unused[session.id] = owned.in_use.pop(session.id)
        elif not session.calls:
            session.cache.close()

    async def reserve(self, cache: KeyValueCache, stop: int) -> None:
        """Create the pages of rows up to `stop`; end sessions of the same owner for them that are not in use, if necessary.

        Raises OutOfMemory.
        """
        if not cache.missing_bytes(stop):
            return
        if self._shortage(cache.owner, cache.missing_bytes(stop)) is not None:
            await self._make_room(cache, stop)
        try:
            cache.reserve(stop)
        except Exception as error:
            raise error_of_batch(error) from None

    def end(self, session: Session, reason: Reason) -> None:
        """End a session. Its memory is free afterwards, or once the call that uses it is done."""
        if self._sessions.pop(session.id, None) is None:
            return
        self._numbers.give_back(session.owner, 1)
        owned = self._owners[session.owner]
        del owned.sessions[session.id]
        owned.unused.pop(session.id, None)
        owned.in_use.pop(session.id, None)
        if not owned.sessions:
            del self._owners[session.owner]
        if session.sequence is not None and self._sequences.get(session.sequence) is session:
            del self._sequences[session.sequence]
        self._ended[session.id] = session.owner, reason
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        self.metrics.count_ended_session(reason)
        if not session.calls:
            session.cache.close()

    def info_of(self, session: Session) -> SessionInfo:
        """The description of a session."""
        left = session.used_at + session.idle_seconds - self.clock()
        return SessionInfo(
            id=session.id,
            layer=LayerReference(name=session.layer.name, fingerprint=session.layer.fingerprint),
            length=session.length,
            capacity=session.capacity,
            bytes=session.cache.size,
            idle_seconds=session.idle_seconds,
            expires_at=datetime.fromtimestamp(time.time() + left, UTC).isoformat(timespec="seconds"),
        )

    def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()

    def _shortage(self, owner: str, size: int) -> Shortage | None:
        """What the owner's sessions lack to take `size` more bytes; None if they may."""
        taken = self.pool.of_owner[owner]
        return shortage(self.capacity, self.pool.used, taken, size, SHARE_OF_FREE, least=0 if self.several_owners else self.capacity)

    def _no_memory(self, lacking: Shortage) -> OutOfMemory:
        if lacking.of_caller:
            return OutOfMemory(f"the sessions of one API key may have {SHARE_OF_FREE} times the free bytes (session_memory)")
        problem = f"the pages of all sessions may have {self.capacity} bytes (session_memory), and {lacking.missing} more would be needed"
        return OutOfMemory(problem)

    async def _make_room(self, cache: KeyValueCache, stop: int) -> None:
        """End the owner's least recently used sessions that are not in use until there is room for the rows of `cache` up to `stop`.

        Raises OutOfMemory; then no session has ended, unless others took the memory meanwhile. A session stays if `cache` and sessions in
        use have all its pages. Each session is looked at once, and the event loop does other work after SESSIONS_AT_ONCE of them.
        """
        owner, owned = cache.owner, self._owners.get(cache.owner)
        candidates = deque([] if owned is None else owned.unused.values())
        while (lacking := self._shortage(owner, cache.missing_bytes(stop))) is not None:
            in_use = self._pages_in_use(owner, cache)
            evictable = self.pool.of_owner[owner] - sum(page.size for page in in_use.values())
            if (missing := self._shortage(owner, cache.missing_bytes(stop) - evictable)) is not None:
                raise self._no_memory(missing)
            if not candidates:
                raise self._no_memory(lacking)
            enough, looked_at = self.pool.used - lacking.missing, 0
            while candidates and self.pool.used > enough and looked_at < SESSIONS_AT_ONCE:
                session, looked_at = candidates.popleft(), looked_at + 1
                if session.id in self._sessions and not session.calls and any(id(page) not in in_use for page in session.cache.pages):
                    self.end(session, "memory")
            await asyncio.sleep(0)

    def _pages_in_use(self, owner: str, cache: KeyValueCache) -> dict[int, Page]:
        """The pages of this cache, and of the owner's sessions that are in use, each once."""
        owned = self._owners.get(owner)
        caches = [cache] if owned is None else [cache, *(session.cache for session in owned.in_use.values())]
        return {id(page): page for cache in caches for page in cache.pages}

    def _follow_layer(self, session: Session) -> None:
        """End the session if its layer is no longer served. An equal layer in its place becomes that of the session."""
        layer = self.layers.get(session.layer.name)
        if layer is None:
            self.end(session, "layer_removed")
        elif layer.fingerprint != session.layer.fingerprint:
            self.end(session, "layer_replaced")
        else:
            session.layer = layer

    async def _sweep_regularly(self) -> None:
        """Sweep once a second while there are sessions."""
        while self._sessions:
            await self.sweep()
            await asyncio.sleep(SWEEP_SECONDS)
        self._sweeping = None

    async def sweep(self) -> None:
        """End idle sessions, and those without a layer. The event loop does other work after SESSIONS_AT_ONCE of them."""
        sessions = iter(list(self._sessions.values()))
        while some := list(islice(sessions, SESSIONS_AT_ONCE)):
            now = self.clock()
            for session in some:
                if session.calls:
                    continue
                if session.used_at + session.idle_seconds <= now:
                    self.end(session, "idle")
                else:
                    self._follow_layer(session)
            await asyncio.sleep(0)
