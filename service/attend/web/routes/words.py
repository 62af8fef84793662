"""/words: vectors of a text, and tokens by the caller's tokenizer, for the page at GET / and for examples."""

import json

from starlette.responses import Response

from attend.errors import LayerConflict
from attend.serving.words.tokens import MAX_BODY_BYTES
from attend.web.endpoints import ADMIN, INFER, LAYER, READ, EndpointTable
from attend.web.request_reader import receive_body
from attend.web.requests import Body, HttpRequest
from attend.wire.negotiation import JSON
from attend.wire.schemas.words import TokenizedText, TokensRequest, Vocabulary, Words, WordsRequest

WORDS_EXAMPLE = {"text": "The cat sat on the mat", "layer": "default"}
MODEL = {"type": "WordLevel", "vocab": {"[UNK]": 0, "cat": 1, "sat": 2}, "unk_token": "[UNK]"}
TOKENS_EXAMPLE = {"tokenizer": json.dumps({"pre_tokenizer": {"type": "Whitespace"}, "model": MODEL}), "text": "cat sat"}
MAX_TEXT_BODY_BYTES = 1 << 20  # bytes; the longest text with every character escaped
endpoints = EndpointTable()


@endpoints.add("GET", "/words", READ, tags=["words"], response_model=Vocabulary)
async def get_words(request: HttpRequest) -> Response:
    """The trained models whose layers are available, and what to install for others."""
    return Response((await request.app.state.encoder.vocabulary()).model_dump_json(), media_type=JSON)


@endpoints.add(
    "POST",
    "/words",
    INFER,
    needs_layers=True,
    tags=["words"],
    response_model=Words,
    body=Body(WordsRequest, ((WORDS_EXAMPLE, "A sentence for the layer `default`."),)),
    refusals=LAYER,
)
async def post_words(request: HttpRequest) -> Response:
    """Tokens and vectors of a sentence for a layer: of a trained model for its own layers, from hashes of the words for others."""
    await receive_body(request, largest=MAX_TEXT_BODY_BYTES)
    return Response(await request.app.state.encoder.reply(request), media_type=JSON)


@endpoints.add(
    "POST",
    "/words/tokens",
    ADMIN,
    tags=["words"],
    response_model=TokenizedText,
    body=Body(TokensRequest, ((TOKENS_EXAMPLE, "A tokenizer that knows two words."),)),
    refusals=(LayerConflict,),
)
async def post_words_tokens(request: HttpRequest) -> Response:
    """Tokens of a text by the tokenizer in the request, such as that of a model whose layers were added. The server keeps neither.

    It is allowed where layers may be changed: a tokenizer has regular expressions, which can take long. The server needs the package
    `tokenizers`.
    """
    request.app.state.extensions.require_writable()
    await receive_body(request, largest=MAX_BODY_BYTES)
    return Response(await request.app.state.tokenizers.read(request), media_type=JSON)
