"""What requests to a session may have, whose keys are its cached rows. Checks that no needed row is freed."""

from collections.abc import Mapping
from typing import Any

from attend.attention.call import Call
from attend.axes import TENSOR_FIELDS
from attend.errors import InvalidRequest, SessionConflict
from attend.serving.sessions.session import Session
from attend.wire.problems import describe_value
from attend.wire.schemas.attend import AttendRequest

KEY_ROWS = [name for name, field in TENSOR_FIELDS.items() if field.new_rows and "k" in field]
SEQUENCE_LENGTHS = [name for name, field in TENSOR_FIELDS.items() if "sequences" in field]
NULLABLE_FIELDS = {name for name, field in AttendRequest.model_fields.items() if field.default is None}


def members_that_read(session: Session, members: Mapping[str, Any]) -> dict[str, Any]:
    """The members of a request that names a session in place of keys, without its name. Raises InvalidRequest."""
    others = {name: value for name, value in present_members(members).items() if name != "session"}
    for name in ("layer", *KEY_ROWS, *SEQUENCE_LENGTHS):
        if name in others:
            raise InvalidRequest.where(f"/{name}", f"no {name} beside session", name)
    return with_session_defaults(session, others)


def session_in_body(members: Mapping[str, Any]) -> str | None:
    """The id of the session that a request names in place of keys; None if it names none. Raises InvalidRequest."""
    name = members.get("session")
    if name is not None and not isinstance(name, str):
        raise InvalidRequest.where("/session", "a string, the id of a session", describe_value(name))
    return name


def with_session_defaults(session: Session, members: Mapping[str, Any]) -> dict[str, Any]:
    """The members of a request to a session, with its layer, and by default the next position."""
    return {"query_offset": session.length, **members, "layer": session.layer.name}


def present_members(members: Mapping[str, Any]) -> dict[str, Any]:
    """The members that a request has: null means for most fields that they are left out."""
    return {name: value for name, value in members.items() if value is not None or name not in NULLABLE_FIELDS}


def require_rows(session: Session, call: Call) -> None:
    """Raises SessionConflict if the call needs rows that are freed."""
    if not session.cache.first:
        return
    if call.masks.positions.numel():
        session.require_visible(int(call.masks.positions.min()), "/query_offset")
    if call.options.fully_masked == "uniform" and session.layer.attention.fully_masked(call) is not None:
        expected = "zero or error, since a query without any key would average rows that the layer's window has freed"
        raise SessionConflict.where("/fully_masked", expected, "uniform")
    if (pattern := call.optional_inputs.get("pattern")) is not None:
        freed, rows = pattern[..., : session.cache.first], call.optional_inputs.get("pattern_rows")
        if (freed if rows is None else freed * rows).any():
            expected = f"weights of 0 for the first {session.cache.first} rows, which the layer's window has freed"
            raise SessionConflict.where("/pattern", expected, "others")
