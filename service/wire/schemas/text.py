"""The documents of /words: a text -> tokens and a vector for each, which POST /attend takes as query, key or value.

`serving/embeddings.py` computes the vectors; `serving/text.py` chooses the layer.
"""

from typing import Annotated, Literal

from pydantic import Field

from service.wire.schemas.document import LAYER_NAME, Document, LayerReference
from service.wire.schemas.tensors import Base64Tensor

MAX_TEXT_CHARACTERS = 65536

Part = Literal["query", "key", "value"]


class WordsRequest(Document):
    """A text, and the layer and input that its vectors are for."""

    text: Annotated[str, Field(max_length=MAX_TEXT_CHARACTERS)] = Field(
        description="At least one word.", json_schema_extra={"pattern": r"\S"}
    )
    layer: str = Field(default="default", pattern=LAYER_NAME, description="Name of the layer that the vectors are for.")
    part: Part = Field(default="query", description="The input of the layer that the vectors are for; they have its width.")


class Words(Document):
    """Tokens, and a vector for each."""

    layer: LayerReference
    tokens: list[str]
    vectors: Base64Tensor = Field(description="[tokens, width], to be sent as query, key or value.")
    meaningful: bool = Field(description="Whether the layer was trained on such vectors.")
    note: str = Field(description="Where vectors and weights come from.")


class Vocabulary(Document):
    """The available layers of a real model."""

    layers: list[str] = Field(description="Layers of the installed model; each is loaded when /words first names it.")
    note: str
