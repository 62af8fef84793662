"""The bodies and replies of /sessions: sequences whose keys and values the server keeps, as pydantic models."""

from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from attend.axes import Kind
from attend.spec_parts import WHOLE, Width
from attend.wire.schemas.attend import AttendReply, AttendRequest
from attend.wire.schemas.schema import LAYER_NAME, LayerReference, Schema, StrictBool

MAX_IDLE_SECONDS = 7 * 24 * 3600
Length = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True), WHOLE]


class PostSession(Schema):
    """A new session."""

    layer: str = Field(default="default", pattern=LAYER_NAME, description="Name of the layer.", examples=["default"])
    capacity: Width | None = Field(default=None, description="Most rows; unlimited if null.")
    idle_seconds: Annotated[float, Field(gt=0, le=MAX_IDLE_SECONDS, strict=True)] = Field(
        default=300.0, description="Seconds without a request after which the session ends."
    )


class PatchSession(Schema):
    """A shorter length."""

    length: Length = Field(description="Number of rows to keep, the first ones.", examples=[3])


class PostFork(Schema):
    """A copy of a session, or of its beginning."""

    length: Length | None = Field(default=None, description="Number of rows of the new session; all if null.")


class SessionInfo(Schema):
    """A session: one sequence, and the rows that its layer has projected."""

    id: str
    layer: LayerReference
    length: int = Field(description="Number of rows.")
    capacity: int | None = Field(description="Most rows; unlimited if null.")
    bytes: int = Field(description="Memory of its pages, those included that it shares with forks.")
    idle_seconds: float
    expires_at: str = Field(description="When it ends without another request, as ISO 8601 in UTC.")


class Sessions(Schema):
    sessions: list[SessionInfo]


class SessionLength(Schema):
    """The session of a call, and how long it is after the call."""

    id: str
    length: int = Field(description="Number of rows after the call.")


class StepOptions(Schema):
    """The fields that only calls with a session have."""

    append: StrictBool = Field(default=True, description="Whether key and value are appended; if not, there must be none.")
    expected_length: Length | None = Field(
        default=None, description="Number of rows that the session must have before the call; if it has another, nothing is appended."
    )


def _without_layer(schema: dict[str, Any]) -> None:
    del schema["properties"]["layer"]


class SessionAttendRequest(AttendRequest, StepOptions):
    """The body of POST /attend without `layer`. `key` and `value` are the rows to append; masks and tokens cover all keys.

    A batch axis has length 1. `query_offset` is the session's length before the call if it is null.
    """

    model_config = ConfigDict(json_schema_extra=_without_layer)
    tensor_kinds: ClassVar[dict[str, Kind]] = {}


class SessionAttendReply(AttendReply):
    """The reply of POST /attend, and the session after the call."""

    session: SessionLength
