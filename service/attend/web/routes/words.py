"""/words: vectors of a text, for the page at GET / and for examples."""

from fastapi import Response
from starlette.concurrency import run_in_threadpool

from attend.serving.service import Service
from attend.serving.words.encoder import TextEncoder
from attend.web.endpoints import INFER, LAYER, READ, EndpointTable
from attend.web.records import Body, CurrentRecord
from attend.web.request_reader import read_request
from attend.wire.negotiation import JSON
from attend.wire.schemas.words import Vocabulary, Words, WordsRequest

WORDS_EXAMPLE = {"text": "The cat sat on the mat", "layer": "default"}
MAX_TEXT_BODY_BYTES = 1 << 20  # bytes; the longest text with every character escaped


def add_endpoints(table: EndpointTable, service: Service, models: bool) -> None:
    """Adds the endpoints. `models`: whether layers of trained models may be loaded on demand."""
    encoder = TextEncoder(service, models)

    @table.add("GET", "/words", READ, tags=["words"], response_model=Vocabulary)
    async def get_words() -> Vocabulary:
        """The trained models whose layers are available, and what to install for others."""
        return await encoder.vocabulary()

    @table.add(
        "POST",
        "/words",
        INFER,
        needs_layers=True,
        tags=["words"],
        response_model=Words,
        body=Body(WordsRequest, ((WORDS_EXAMPLE, "A sentence for the layer `default`."),)),
        refusals=LAYER,
    )
    async def post_words(record: CurrentRecord) -> Response:
        """Tokens and vectors of a sentence for a layer: of a trained model for its own layers, from hashes of the words for others."""
        words = await encoder.read(await read_request(record, service, largest=MAX_TEXT_BODY_BYTES))
        return Response(await run_in_threadpool(words.model_dump_json), media_type=JSON)  # megabytes for a wide layer
