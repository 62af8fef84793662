"""The documents of /words: text in, tokens and a vector for each out, in a form that can be put into a request to /attend as it is.

How words become vectors is the business of `serving/embeddings.py`, which layer they are for that of `serving/text.py`.
"""

import binascii
from typing import Annotated, Literal

from pydantic import Field

from service.tensors import Array, datatype_of, raw
from service.wire.arrays import Base64Tensor
from service.wire.schemas.attend import LAYER_NAME, Document, LayerReference

LONGEST = 65536  # characters; a sentence to look at has some hundreds

Part = Literal["query", "key", "value"]


class WordsRequest(Document):
    """A sentence, the layer it is to be put through, and as what."""

    text: Annotated[str, Field(max_length=LONGEST)] = Field(description="At least one word.", json_schema_extra={"pattern": r"\S"})
    layer: str = Field(default="default", pattern=LAYER_NAME, description="Name of the layer whose input the vectors are to be.")
    part: Part = Field(default="query", description="What they are to be; a layer may have keys and values of other widths.")


class Words(Document):
    """Tokens, and their vectors as the layer takes them."""

    layer: LayerReference
    tokens: list[str]
    vectors: Base64Tensor = Field(description="[tokens, width], to be sent as query, key or value.")
    meaningful: bool = Field(description="Whether the layer was trained on such vectors.")
    note: str = Field(description="Where vectors and weights come from.")


class Vocabulary(Document):
    """The available layers of a real model."""

    layers: list[str] = Field(description="Layers of the installed model; each is loaded when /words first names it.")
    note: str


def base64_tensor(array: Array) -> Base64Tensor:
    """The array in the wire's own form."""
    text = binascii.b2a_base64(raw(array), newline=False).decode()
    return Base64Tensor(shape=list(array.shape), datatype=datatype_of(array).name, base64=text)
