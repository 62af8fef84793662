"""GET and POST /words: tokens and vectors of a text, for use in a request to /attend. The page uses them."""

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

from service.serving.service import Service
from service.serving.text import TextEncoder
from service.web.openapi import BODY_ERRORS, WORDS_EXAMPLE, error_responses, request_body_doc
from service.web.request_reader import read_request
from service.wire.negotiation import JSON
from service.wire.schemas.text import Vocabulary, Words

MAX_BODY_BYTES = 1 << 20  # bytes; the longest text with every character escaped


def install(app: FastAPI, service: Service, model: bool) -> None:
    """Adds the routes. `model`: whether layers of the installed model may be loaded on demand."""
    encoder = TextEncoder(service, model)

    @app.get("/words", tags=["words"], response_model=Vocabulary)
    async def get_words() -> Vocabulary:
        """The available layers of a real model, or what to install for them."""
        return await encoder.vocabulary()

    @app.post(
        "/words",
        tags=["words"],
        response_model=Words,
        responses=error_responses(*BODY_ERRORS),
        openapi_extra=request_body_doc("WordsRequest", (WORDS_EXAMPLE, "A sentence for the layer `default`.")),
    )
    async def post_words(request: Request) -> Response:
        """Tokens and vectors of a sentence for a layer: from the real model for its own layers, from hashes of the words for others."""
        service.require_started()
        words = await encoder.read(await read_request(request.scope["attend"], request.receive, service, largest=MAX_BODY_BYTES))
        return Response(await run_in_threadpool(words.model_dump_json), media_type=JSON)  # megabytes for a wide layer
