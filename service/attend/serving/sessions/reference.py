"""Which session a call is for: named in its path, in its body, or by the sequence of the Open Inference Protocol that it is a part of."""

from dataclasses import dataclass

from attend.errors import InvalidRequest
from attend.wire.codec import Decoded, SequencePart
from attend.wire.problems import describe_value


@dataclass(frozen=True, slots=True)
class SessionReference:
    """The id of a session, and where the body has it, "" for the path; or a part of a sequence of a layer."""

    id: str = ""
    at: str = ""
    sequence: SequencePart | None = None
    layer: str = ""


def reference_of(in_path: str, decoded: Decoded, in_body: bool) -> SessionReference | None:
    """The session of a call; None if it has none. `in_path`: the id that its path has, or ""; `in_body`: whether its body may have one.

    Raises InvalidRequest.
    """
    if decoded.sequence is not None:
        return SessionReference(sequence=decoded.sequence, layer=decoded.members["layer"])
    if in_path:
        return SessionReference(in_path)
    name = decoded.members.get("session") if in_body else None
    if name is None:
        return None
    if not isinstance(name, str):
        raise InvalidRequest.where("/session", "a string, the id of a session", describe_value(name))
    return SessionReference(name, "/session")
