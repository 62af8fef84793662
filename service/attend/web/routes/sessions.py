"""/sessions: create, list, shorten, fork, export, import and end sessions, and attend with them."""

from typing import Annotated

from fastapi import Path
from starlette.responses import Response

from attend.errors import LengthMismatch, NotAcceptable, OutOfMemory, Overloaded, SessionConflict, SessionNotFound
from attend.serving.layer_requests import read_body
from attend.serving.sessions.locks import lock_session
from attend.serving.sessions.steps import STEP
from attend.serving.sessions.transfer import export_cache, import_cache
from attend.web.endpoints import INFER, LAYER, SESSION, TIMED, EndpointTable
from attend.web.openapi import BINARY
from attend.web.replies import PiecesResponse, response_of_file
from attend.web.request_reader import begin_without_body, receive_body
from attend.web.requests import Body, HttpRequest
from attend.wire.negotiation import BINARY_TYPES, JSON, SAFETENSORS
from attend.wire.schemas.sessions import (
    PatchSession,
    PostFork,
    PostSession,
    SessionAttendReply,
    SessionAttendRequest,
    SessionInfo,
    Sessions,
)

STEP_EXAMPLE = {"query": [[0.1] * 64], "causal": True, "outputs": ["output"], "reply": {"decimals": 3}}
MAX_BODY_BYTES = 1 << 16  # bytes of a body without tensors
INFO_BYTES = 400  # of the description of a session, roughly
SessionIdPath = Annotated[str, Path(description="The id of the session.")]
endpoints = EndpointTable()


@endpoints.add(
    "POST",
    "/sessions",
    INFER,
    needs_layers=True,
    tags=["sessions"],
    status_code=201,
    response_model=SessionInfo,
    body=Body(PostSession, (({"layer": "default"}, "A session of the layer `default`."),), required=False),
    refusals=(*LAYER, SessionNotFound),
)
async def post_session(request: HttpRequest) -> Response:
    """Starts a session: a sequence whose keys and values the server keeps."""
    sessions = request.service.engine.require_sessions()
    await receive_body(request, largest=MAX_BODY_BYTES)
    session = sessions.create(await read_body(request.service, request, PostSession), request.api_key)
    return _created(request, sessions.info_of(session))


@endpoints.add("GET", "/sessions", INFER, tags=["sessions"], response_model=Sessions, refusals=(SessionNotFound, *TIMED))
async def get_sessions(request: HttpRequest) -> Response:
    """The caller's sessions, least recently used first."""
    sessions = request.service.engine.require_sessions()
    begin_without_body(request)
    found = await sessions.infos_of_owner(request.api_key)

    def text() -> str:
        return Sessions(sessions=found).model_dump_json()

    return Response(await request.service.engine.run(request, INFO_BYTES * len(found), text), media_type=JSON)


@endpoints.add(
    "GET",
    "/sessions/{id}",
    INFER,
    tags=["sessions"],
    response_model=SessionInfo,
    refusals=SESSION,
)
async def get_session(request: HttpRequest, id: SessionIdPath) -> Response:
    """One session."""
    sessions = request.service.engine.require_sessions()
    return _info(sessions.info_of(sessions.find(id, request.api_key)))


@endpoints.add(
    "DELETE",
    "/sessions/{id}",
    INFER,
    tags=["sessions"],
    status_code=204,
    response_class=Response,  # without a body and its type
    refusals=(*SESSION, *TIMED),
)
async def delete_session(request: HttpRequest, id: SessionIdPath) -> Response:
    """Ends a session, after the call that uses it; its memory is free when the reply arrives."""
    sessions = request.service.engine.require_sessions()
    begin_without_body(request)
    async with lock_session(sessions, id, request.api_key, request) as session:
        sessions.end(session, "deleted")
    return Response(status_code=204)


@endpoints.add(
    "PATCH",
    "/sessions/{id}",
    INFER,
    tags=["sessions"],
    response_model=SessionInfo,
    body=Body(PatchSession, (({"length": 3}, "Keeps the first three rows."),)),
    refusals=(*SESSION, SessionConflict),
)
async def patch_session(request: HttpRequest, id: SessionIdPath) -> Response:
    """Rolls a session back to a shorter length."""
    sessions = request.service.engine.require_sessions()
    sessions.find(id, request.api_key)
    await receive_body(request, largest=MAX_BODY_BYTES)
    body = await read_body(request.service, request, PatchSession)
    async with lock_session(sessions, id, request.api_key, request) as session:
        session.truncate(body.length)
    return _info(sessions.info_of(session))


@endpoints.add(
    "POST",
    "/sessions/{id}/fork",
    INFER,
    tags=["sessions"],
    status_code=201,
    response_model=SessionInfo,
    body=Body(PostFork, (({"length": None}, "A copy of the whole session."),), required=False),
    refusals=(*SESSION, SessionConflict),
)
async def fork_session(request: HttpRequest, id: SessionIdPath) -> Response:
    """Starts a session with the first rows of another. Both share pages until one of them writes to them."""
    sessions = request.service.engine.require_sessions()
    sessions.find(id, request.api_key)
    await receive_body(request, largest=MAX_BODY_BYTES)
    body = await read_body(request.service, request, PostFork)
    async with lock_session(sessions, id, request.api_key, request) as session:
        fork = sessions.fork(session, body.length)
    return _created(request, sessions.info_of(fork))


@endpoints.add(
    "POST",
    "/sessions/{id}/attend",
    INFER,
    needs_layers=True,
    tags=["sessions"],
    response_model=SessionAttendReply,
    body=Body(SessionAttendRequest, ((STEP_EXAMPLE, "Appends a row, and attends to all."),), BINARY_TYPES),
    refusals=(*SESSION, SessionConflict, LengthMismatch, NotAcceptable),
)
async def attend_in_session(request: HttpRequest, id: SessionIdPath) -> Response:
    """Appends rows, and attends to all rows of the session.

    The body is that of POST /attend without `layer`. Key and value are projected and appended first; by default they are the query.
    """
    request.service.engine.require_sessions().find(id, request.api_key)  # before the body is read
    await receive_body(request)
    return PiecesResponse(await request.service.engine.answer(request, STEP, id))


@endpoints.add(
    "GET",
    "/sessions/{id}/cache",
    INFER,
    tags=["sessions"],
    response_class=Response,
    responses={200: {"content": {SAFETENSORS: {"schema": BINARY}}, "description": "The rows."}},
    refusals=(*SESSION, *TIMED, Overloaded, OutOfMemory),
)
async def get_cache(request: HttpRequest, id: SessionIdPath) -> Response:
    """The rows of a session as a safetensors file that PUT accepts: `key` and `value` [kv heads, n, d], or `latent` and `rope_key`; and
    `index_key` of an indexer."""
    sessions = request.service.engine.require_sessions()
    begin_without_body(request)
    pieces = await export_cache(request.service, sessions, id, request.api_key, request)
    return response_of_file(pieces, "cache")


@endpoints.add(
    "PUT",
    "/sessions/{id}/cache",
    INFER,
    needs_layers=True,
    tags=["sessions"],
    response_model=SessionInfo,
    body=Body(None, binary=(SAFETENSORS,)),
    refusals=(*SESSION, SessionConflict),
)
async def put_cache(request: HttpRequest, id: SessionIdPath) -> Response:
    """Replaces the rows of a session by those of an exported file. The layers must have the same fingerprint."""
    sessions = request.service.engine.require_sessions()
    sessions.find(id, request.api_key)
    await receive_body(request, layer=True)
    return _info(sessions.info_of(await import_cache(request.service, sessions, id, request.api_key, request)))


def _info(info: SessionInfo) -> Response:
    return Response(info.model_dump_json(), media_type=JSON)


def _created(request: HttpRequest, info: SessionInfo) -> Response:
    """201, with the path of the new session."""
    location = f"{request.scope.get('root_path', '')}/sessions/{info.id}"
    return Response(info.model_dump_json(), 201, {"Location": location}, media_type=JSON)
