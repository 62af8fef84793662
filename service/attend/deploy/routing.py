"""Which replica a request for a session goes to."""

from collections.abc import Collection
from hashlib import blake2b

from attend.errors import SessionNotFound
from attend.serving.sessions.ids import process_of


def replica_of(session: str, names: Collection[str]) -> str | None:
    """The replica of these names that has the session; None: any, since it ended with its replica, or the text is empty.

    Another text than the id of a session, such as the id of a sequence of the Open Inference Protocol, chooses a replica by rendezvous
    hashing: most texts keep their replica when another one is added or removed.
    """
    try:
        name = process_of(session).replica
    except SessionNotFound:
        return max(names, key=lambda name: blake2b(f"{name} {session}".encode()).digest()) if session and names else None
    return name if name in names else None
