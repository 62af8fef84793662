"""GET and POST /words: text for people who have no vectors. What the page asks before it asks /attend."""

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

from service.serving.service import Service
from service.serving.text import TextEncoder
from service.web.openapi.examples import WORDS
from service.web.request_reader import read
from service.web.routes.attend import demand_started, refusals, takes
from service.wire.negotiation import JSON
from service.wire.schemas.text import Vocabulary, Words

LARGEST = 1 << 20  # bytes of a body: of the longest text, each character written as an escape


def install(app: FastAPI, service: Service, model: bool) -> None:
    """Adds the routes; `model` is whether layers of the installed model may be made on demand."""
    dictionary = TextEncoder(service, model)

    @app.get("/words", tags=["words"], response_model=Vocabulary)
    async def get_words() -> Vocabulary:
        """Which layers of a real model there are to look at, and what is missing where there are none."""
        return await dictionary.vocabulary()

    @app.post(
        "/words",
        tags=["words"],
        response_model=Words,
        responses=refusals(400, 404, 409, 413, 415, 422, 429, 500, 503, 504, 507),
        openapi_extra=takes("WordsRequest", WORDS, "A sentence for the layer `default`."),
    )
    async def post_words(request: Request) -> Response:
        """Tokens and vectors of a sentence, as the layer takes them: by the real model where the layer is its own, by hash elsewhere."""
        demand_started(service)
        words = await dictionary.read(await read(request.scope["attend"], request.receive, service, largest=LARGEST))
        return Response(await run_in_threadpool(words.model_dump_json), media_type=JSON)  # megabytes for a wide layer
