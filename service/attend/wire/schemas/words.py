"""The documents of /words: a text -> tokens and a vector for each, which POST /attend takes as query, key or value; or tokens alone.

`serving/words/` computes them and chooses the layer.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from attend.wire.schemas.schema import LAYER_NAME, LayerReference, Schema, StrictBool
from attend.wire.schemas.tensors import Base64Tensor

MAX_TEXT_CHARACTERS = 65536

Part = Literal["query", "key", "value"]
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARACTERS)]


class WordsRequest(Schema):
    """A text, and the layer and input that its vectors are for."""

    text: Text = Field(description="At least one word.", json_schema_extra={"pattern": r"\S"})
    layer: str = Field(default="default", pattern=LAYER_NAME, description="Name of the layer that the vectors are for.")
    part: Part = Field(default="query", description="The input of the layer that the vectors are for; they have its width.")
    effects: StrictBool = Field(default=False, description="Whether to compute what each head of the model does to its answer to the text.")


class TokensRequest(Schema):
    """A text, and the tokenizer of a model."""

    tokenizer: str = Field(description="The text of the model's tokenizer.json.")
    text: Text


class TokenizedText(Schema):
    """The tokens of a text, with the special tokens that the tokenizer adds, without padding and truncation."""

    ids: list[int] = Field(description="Their rows in the model's table of embeddings.")
    tokens: list[str] = Field(description="As people read them; as the vocabulary has them, for parts of characters and for spaces.")


class Effects(Schema):
    """What each head of a model does to its answer to a text."""

    answer: str = Field(description="The most likely next token.")
    probability: float = Field(description="Its probability.")
    change: list[list[float]] = Field(description="[layers, heads]: the change of the logarithm of that probability without each head.")


class Words(Schema):
    """Tokens, and a vector for each."""

    layer: LayerReference
    tokens: list[str]
    vectors: Base64Tensor = Field(description="[tokens, width], to be sent as query, key or value.")
    meaningful: bool = Field(description="Whether the layer was trained on such vectors.")
    note: str = Field(description="Where vectors and weights come from.")
    options: dict[str, Any] = Field(description="Fields of a request, as in the model's own calls of the layer, such as `causal`.")
    heads: list[str] = Field(description="What each head of the layer has learned; empty where that is not known.")
    effects: Effects | None = Field(default=None, description="If they were requested, and the model predicts tokens.")


class ModelLayers(Schema):
    """The attention layers of a trained model."""

    title: str
    layers: list[str] = Field(description="Names of layers; each is loaded when POST /words first names it.")
    first: str = Field(description="The layer whose heads are the first to look at.")
    options: dict[str, Any] = Field(description="Fields of a request, as in the model's own calls, such as `causal`.")


class Vocabulary(Schema):
    """The models whose layers POST /words has inputs for."""

    models: list[ModelLayers]
    note: str = Field(description="What to install for another model, or why there is none.")
