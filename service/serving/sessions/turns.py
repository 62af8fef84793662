"""Which session a call is for, and its turn: calls to one session run one after the other, in the order in which they arrive."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from service.errors import DeadlinePassed, InvalidRequest, Problem, SessionEnded, SessionNotFound, WrongReplica, WrongWorker
from service.serving.requests import TOO_LATE, RawRequest
from service.serving.sessions.registry import Session, SessionRegistry
from service.wire.codec import Decoded, SequencePart
from service.wire.problems import describe_value
from service.wire.schemas.document import Document
from service.wire.schemas.sessions import PostSession


def turn_of_call(sessions: SessionRegistry, raw: RawRequest, decoded: Decoded) -> AbstractAsyncContextManager[Session]:
    """The turn of a call in its session, which its sequence, its path or its body names."""
    if decoded.sequence is not None:
        return turn_in_sequence(sessions, decoded.members["layer"], decoded.sequence, raw)
    return turn(sessions, raw.session or session_in_body(sessions, decoded, raw.key).id, raw.key, raw)


@asynccontextmanager
async def turn(sessions: SessionRegistry, session_id: str, owner: str, raw: RawRequest) -> AsyncIterator[Session]:
    """The session, for one call at a time. If that call fails, the session keeps the rows that it had.

    Raises what `SessionRegistry.find` raises, and CallerGone or DeadlinePassed if the caller cannot wait.
    """
    session = sessions.find(session_id, owner)
    session.calls += 1
    try:
        try:
            async with asyncio.timeout(None if raw.deadline is None else raw.deadline - sessions.clock()):
                await session.lock.acquire()
        except TimeoutError:
            raise DeadlinePassed(TOO_LATE) from None
        length = session.length
        try:
            raw.check_caller(sessions.clock())
            sessions.find(session_id, owner)  # it may have ended meanwhile
            yield session
            length = session.length
        finally:
            session.lock.release()
            session.cache.truncate(length)  # also drops pages that a failed call has reserved
            session.cache.free_hidden()
    finally:
        sessions.release(session)


@asynccontextmanager
async def turn_in_sequence(sessions: SessionRegistry, layer: str, part: SequencePart, raw: RawRequest) -> AsyncIterator[Session]:
    """The turn of a part of a sequence of the Open Inference Protocol: its first part starts a session, and its last one ends it.

    Raises InvalidRequest for a part of a sequence that has not begun.
    """
    key = (raw.key, layer, part.id)
    before = sessions.sequences.get(key)
    if part.start:
        session = sessions.create(PostSession(layer=layer), raw.key)
        session.sequence, sessions.sequences[key] = key, session.id
    elif before is None:
        expected = "sequence_start, or the id of a sequence of this model that has begun"
        raise InvalidRequest.where("/parameters/sequence_id", expected, describe_value(part.id))
    try:
        async with turn(sessions, sessions.sequences[key], raw.key, raw) as session:
            yield session
    except BaseException:
        if part.start:  # a start that is refused leaves a sequence of this id as it was
            sessions.end(session, "deleted")
            if before is not None and before in sessions:
                sessions.sequences[key] = before
        raise
    if part.start and before is not None and before in sessions:
        sessions.end(sessions[before], "deleted")
    if part.end:
        sessions.end(session, "deleted")


def session_in_body(sessions: SessionRegistry, decoded: Decoded, owner: str) -> Session:
    """The session that the body names. Raises what `SessionRegistry.find` raises, with the place in the body."""
    name = decoded.members["session"]
    if not isinstance(name, str):
        raise InvalidRequest.where("/session", "a string, the id of a session", describe_value(name))
    try:
        return sessions.find(name, owner)
    except (SessionNotFound, SessionEnded, WrongReplica) as error:
        expected = error.problems[0].expected if error.problems else "the id of a session that this server keeps"
        raise type(error)(error.detail, [Problem("/session", expected, describe_value(name))]) from None


def require_this_worker(sessions: SessionRegistry, raw: RawRequest, decoded: Decoded, document: type[Document]) -> None:
    """Raises WrongWorker if another process has the session of a call, NotReady if that process is being started."""
    if sessions.workers is None:
        return
    try:
        if decoded.sequence is not None:
            sessions.workers.require_sequence(raw.key, decoded.members["layer"], decoded.sequence.id)
        elif "session" in document.model_fields and isinstance(name := decoded.members.get("session"), str):
            sessions.require_here(name)
    except WrongWorker:
        raise
    except (SessionNotFound, SessionEnded, WrongReplica):
        pass  # `session_in_body` raises it later, with the place in the body
