"""/sessions: create, list, shorten, fork, export, import and end sessions, and attend with them."""

import re
from datetime import datetime, timedelta
from typing import Annotated

from fastapi import Depends, FastAPI, Path, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Send

from service.serving.documents import read_document
from service.serving.engine import ATTEND
from service.serving.requests import RawRequest
from service.serving.service import Service
from service.serving.sessions.registry import SessionRegistry
from service.serving.sessions.transfer import export_cache, import_cache
from service.serving.sessions.turns import turn
from service.web.forwarding import Forwarder
from service.web.openapi import BINARY, BODY_ERRORS, CALL_ERRORS, STEP_EXAMPLE, request_body_doc, session_error_responses
from service.web.records import HttpRecord
from service.web.request_reader import deadline_of, read_request
from service.web.routes.attend import send_reply
from service.web.routes.layers import send_file
from service.wire.negotiation import JSON, SAFETENSORS
from service.wire.schemas.sessions import PatchSession, PostFork, PostSession, SessionAttendReply, SessionDocument, Sessions

SESSIONS = "/sessions/"
ATTEND_PATH = re.compile(rf"{SESSIONS}([^/]+)/attend")
MAX_BODY_BYTES = 1 << 16  # bytes of a body without tensors
DOCUMENT_BYTES = 400  # of the description of a session, roughly
SessionIdPath = Annotated[str, Path(description="The id of the session.")]


async def _registry(request: Request) -> SessionRegistry:
    """The sessions of this server. Raises SessionNotFound if it keeps none."""
    service: Service = request.app.state.service
    return service.engine.require_sessions()


Registry = Annotated[SessionRegistry, Depends(_registry)]


async def attend_step(service: Service, session_id: str, record: HttpRecord, receive: Receive, send: Send) -> None:
    """POST /sessions/{id}/attend; called without FastAPI's routing, as POST /attend is."""
    service.require_started()
    service.engine.require_sessions().find(session_id, record.key)  # before the body is read
    raw = await read_request(record, receive, service)
    raw.session = session_id
    await send_reply(await service.engine.answer(raw, ATTEND), record, send)


def _used_at(document: SessionDocument) -> datetime:
    return datetime.fromisoformat(document.expires_at) - timedelta(seconds=document.idle_seconds)


def install(app: FastAPI, service: Service, forwarder: Forwarder) -> None:
    """Adds the routes."""

    @app.post(
        "/sessions",
        tags=["sessions"],
        status_code=201,
        response_model=SessionDocument,
        responses=session_error_responses(*BODY_ERRORS),
        openapi_extra=request_body_doc("PostSession", ({"layer": "default"}, "A session of the layer `default`."), required=False),
    )
    async def post_session(request: Request, response: Response, sessions: Registry) -> SessionDocument:
        """Starts a session: a sequence whose keys and values the server keeps."""
        service.require_started()
        raw = await read_request(request.scope["attend"], request.receive, service, largest=MAX_BODY_BYTES)
        session = sessions.create(await read_document(service, raw, PostSession), request.scope["attend"].key)
        response.headers["Location"] = f"{request.scope.get('root_path', '')}{SESSIONS}{session.id}"
        return sessions.document(session)

    @app.get("/sessions", tags=["sessions"], response_model=Sessions, responses=session_error_responses(404, 503, 504))
    async def get_sessions(request: Request, sessions: Registry) -> Response:
        """The caller's sessions, least recently used first."""
        key = request.scope["attend"].key
        others = await forwarder.replies_of_others(request.scope, request.scope["attend"])
        found = sessions.of_owner(key)

        def document() -> str:
            documents = [sessions.document(session) for session in found]
            for text in others:
                documents += Sessions.model_validate_json(text).sessions
            if others:
                documents.sort(key=_used_at)
            return Sessions(sessions=documents).model_dump_json()

        # in a thread: thousands of sessions take tenths of a second
        size = DOCUMENT_BYTES * len(found) + sum(map(len, others))
        return Response(await service.engine.codecs.run(document, size, key), media_type=JSON)

    @app.get(
        "/sessions/{id}", tags=["sessions"], response_model=SessionDocument, responses=session_error_responses(404, 410, 421, 503, 504)
    )
    async def get_session(id: SessionIdPath, request: Request, sessions: Registry) -> SessionDocument:
        """One session."""
        return sessions.document(sessions.find(id, request.scope["attend"].key))

    @app.delete("/sessions/{id}", tags=["sessions"], status_code=204, responses=session_error_responses(404, 410, 421, 422, 503, 504))
    async def delete_session(id: SessionIdPath, request: Request, sessions: Registry) -> None:
        """Ends a session, after the call that uses it; its memory is free when the reply arrives."""
        record = request.scope["attend"]
        async with turn(sessions, id, record.key, RawRequest(b"", deadline=deadline_of(record, service))) as session:
            sessions.end(session, "deleted")

    @app.patch(
        "/sessions/{id}",
        tags=["sessions"],
        response_model=SessionDocument,
        responses=session_error_responses(*BODY_ERRORS, 410, 421),
        openapi_extra=request_body_doc("PatchSession", ({"length": 3}, "Keeps the first three rows.")),
    )
    async def patch_session(id: SessionIdPath, request: Request, sessions: Registry) -> SessionDocument:
        """Rolls a session back to a shorter length."""
        sessions.find(id, request.scope["attend"].key)
        raw = await read_request(request.scope["attend"], request.receive, service, largest=MAX_BODY_BYTES)
        document = await read_document(service, raw, PatchSession)
        async with turn(sessions, id, request.scope["attend"].key, raw) as session:
            session.truncate(document.length)
        return sessions.document(session)

    @app.post(
        "/sessions/{id}/fork",
        tags=["sessions"],
        status_code=201,
        response_model=SessionDocument,
        responses=session_error_responses(*BODY_ERRORS, 410, 421),
        openapi_extra=request_body_doc("PostFork", ({"length": None}, "A copy of the whole session."), required=False),
    )
    async def fork_session(id: SessionIdPath, request: Request, response: Response, sessions: Registry) -> SessionDocument:
        """Starts a session with the first rows of another. Both share pages until one of them writes to them."""
        sessions.find(id, request.scope["attend"].key)
        raw = await read_request(request.scope["attend"], request.receive, service, largest=MAX_BODY_BYTES)
        document = await read_document(service, raw, PostFork)
        async with turn(sessions, id, request.scope["attend"].key, raw) as session:
            fork = sessions.fork(session, document.length)
        response.headers["Location"] = f"{request.scope.get('root_path', '')}{SESSIONS}{fork.id}"
        return sessions.document(fork)

    @app.post(
        "/sessions/{id}/attend",
        tags=["sessions"],
        response_model=SessionAttendReply,
        responses=session_error_responses(*CALL_ERRORS, 410, 412, 421),
        openapi_extra=request_body_doc("SessionAttendRequest", (STEP_EXAMPLE, "Appends a row, and attends to all."), binary=True),
    )
    async def attend_in_session(id: SessionIdPath) -> None:
        """Appends rows, and attends to all rows of the session.

        The body is that of POST /attend without `layer`. Key and value are projected and appended first; by default they are the query.
        """
        raise AssertionError("handled before routing")

    @app.get(
        "/sessions/{id}/cache",
        tags=["sessions"],
        response_class=StreamingResponse,
        responses={
            200: {"content": {SAFETENSORS: {"schema": BINARY}}, "description": "The rows."},
            **session_error_responses(404, 410, 421, 422, 429, 503, 504, 507),
        },
    )
    async def get_cache(id: SessionIdPath, request: Request, sessions: Registry) -> StreamingResponse:
        """The rows of a session as a safetensors file that PUT accepts: `key` and `value` [kv heads, n, d], or `latent` and `rope_key`; and
        `index_key` of an indexer."""
        record = request.scope["attend"]
        raw = RawRequest(b"", deadline=deadline_of(record, service), caller=record.key)
        pieces = await export_cache(service, sessions, id, record.key, raw)
        return send_file(pieces, "cache", record, service)

    @app.put(
        "/sessions/{id}/cache",
        tags=["sessions"],
        response_model=SessionDocument,
        responses=session_error_responses(*BODY_ERRORS, 410, 421),
        openapi_extra={"requestBody": {"required": True, "content": {SAFETENSORS: {"schema": BINARY}}}},
    )
    async def put_cache(id: SessionIdPath, request: Request, sessions: Registry) -> SessionDocument:
        """Replaces the rows of a session by those of an exported file. The layers must have the same fingerprint."""
        service.require_started()
        sessions.find(id, request.scope["attend"].key)
        raw = await read_request(request.scope["attend"], request.receive, service, layer=True)
        return sessions.document(await import_cache(service, sessions, id, request.scope["attend"].key, raw))
