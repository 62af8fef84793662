"""The lock of a session: calls to one session run one after the other, in the order in which they arrive."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from attend.errors import DeadlinePassed, InvalidRequest
from attend.serving.requests import TOO_LATE, Request
from attend.serving.sessions.registry import SessionRegistry
from attend.serving.sessions.session import Session
from attend.wire.codec import Decoded, SequencePart
from attend.wire.problems import describe_value
from attend.wire.schemas.sessions import PostSession


def lock_for_call(sessions: SessionRegistry, in_path: str, decoded: Decoded, request: Request) -> AbstractAsyncContextManager[Session]:
    """Lock the session of a call: that of its sequence, else the one whose id its path has, if that is not "", else the one in its body."""
    if decoded.sequence is not None:
        return lock_sequence(sessions, decoded.members["layer"], decoded.sequence, request)
    if in_path:
        return lock_session(sessions, in_path, request.api_key, request)
    return lock_session(sessions, decoded.members["session"], request.api_key, request, "/session")


@asynccontextmanager
async def lock_session(sessions: SessionRegistry, session_id: str, owner: str, request: Request, at: str = "") -> AsyncIterator[Session]:
    """The session, for one call at a time. If that call fails, the session keeps the rows that it had. `at`: where the body has the id.

    Raises what `SessionRegistry.find` raises, and CallerGone or DeadlinePassed if the caller cannot wait.
    """
    session = sessions.find(session_id, owner, at)
    sessions.use(session)
    try:
        try:
            async with asyncio.timeout(None if request.deadline is None else request.deadline - sessions.clock()):
                await session.lock.acquire()
        except TimeoutError:
            raise DeadlinePassed(TOO_LATE) from None
        length = session.length
        try:
            request.check_caller(sessions.clock())
            sessions.find(session_id, owner, at)  # it may have ended meanwhile
            yield session
            length = session.length
        finally:
            session.lock.release()
            session.cache.truncate(length)  # also drops pages that a failed call has reserved
            session.cache.free_hidden()
    finally:
        sessions.release(session)


@asynccontextmanager
async def lock_sequence(sessions: SessionRegistry, layer: str, part: SequencePart, request: Request) -> AsyncIterator[Session]:
    """Lock the session of a sequence of the Open Inference Protocol for one part: its first part starts it, and its last one ends it.

    Raises InvalidRequest for a part of a sequence that has not begun.
    """
    key = (request.api_key, layer, part.id)
    before = sessions.of_sequence(key)
    session = sessions.begin_sequence(key, PostSession(layer=layer)) if part.start else before
    if session is None:
        raise InvalidRequest.where("/sequence", "a part that begins a sequence, or is of one that has begun", describe_value(part.id))
    try:
        async with lock_session(sessions, session.id, request.api_key, request):
            yield session
    except BaseException:
        if part.start:  # a start that is refused leaves a sequence of this id as it was
            sessions.end(session, "deleted")
            if before is not None:
                sessions.resume_sequence(before)
        raise
    if part.start and before is not None:
        sessions.end(before, "deleted")
    if part.end:
        sessions.end(session, "deleted")
