"""Turns text into tokens and vectors for a layer (`/words`), with the functions of `embeddings.py`.

If all-MiniLM-L6-v2 is installed, its layers are loaded on first use. A layer with such a name but other weights gets hashed vectors.
"""

import asyncio

from service.errors import InvalidRequest
from service.serving.documents import read_document
from service.serving.embeddings import InvalidText, ModelNotInstalled, Sentence, hash_words, minilm_layers, read_minilm
from service.serving.layers.files import ParsedLayer
from service.serving.layers.registry import LoadedLayer
from service.serving.requests import RawRequest
from service.serving.service import Service
from service.spec import fingerprint
from service.wire.problems import describe_value
from service.wire.schemas.document import LayerReference
from service.wire.schemas.tensors import Base64Tensor
from service.wire.schemas.text import Vocabulary, Words, WordsRequest

TRAINED_NOTE = "The weights are those of attention layer {} of all-MiniLM-L6-v2 (0 to {}), and the vectors are its input in that model."
UNTRAINED_NOTE = "This pattern means nothing: each word's vector is drawn from a hash of the word, which no layer was trained on."
MAX_NUMBERS = 1 << 21  # of one reply
ONE_WORKER_NOTE = "Only a server with one worker offers the layers of all-MiniLM-L6-v2."


class TextEncoder:
    """Tokens and vectors for the layers of a service. `model`: whether layers of all-MiniLM-L6-v2 may be loaded."""

    def __init__(self, service: Service, model: bool) -> None:
        self.service, self.model = service, model
        self._vocabulary: Vocabulary | None = None

    async def vocabulary(self) -> Vocabulary:
        """GET /words."""
        if self._vocabulary is None:
            self._vocabulary = await asyncio.to_thread(installed_vocabulary) if self.model else Vocabulary(layers=[], note=ONE_WORKER_NOTE)
        return self._vocabulary

    async def read(self, raw: RawRequest) -> Words:
        """POST /words. Raises LayerNotFound, or InvalidRequest for text without words or with too many."""
        request = await read_document(self.service, raw, WordsRequest)
        try:
            if request.layer in (names := (await self.vocabulary()).layers):
                number = names.index(request.layer)
                sentence = await asyncio.to_thread(read_minilm, request.text, number)
                layer = await self._layer_of(request.layer, sentence, number)
                if layer.fingerprint == await asyncio.to_thread(fingerprint, sentence.spec, sentence.weights):
                    return await asyncio.to_thread(_words_of, layer, sentence, True, TRAINED_NOTE.format(number, len(names) - 1))
            layer = self.service.registry.find(request.layer)
            widths = {"query": layer.spec.query_dim, "key": layer.spec.key_dim, "value": layer.spec.value_dim}
            sentence = await asyncio.to_thread(hash_words, request.text, layer.spec, widths[request.part], MAX_NUMBERS)
        except InvalidText as error:
            raise InvalidRequest.where("/text", error.expected, error.got or describe_value(request.text)) from None
        return await asyncio.to_thread(_words_of, layer, sentence, False, UNTRAINED_NOTE)

    async def _layer_of(self, name: str, sentence: Sentence, number: int) -> LoadedLayer:
        """The layer of that name; loaded with the weights in `sentence` if the registry has none."""
        if (layer := self.service.registry.get(name)) is not None:
            return layer
        parsed = ParsedLayer(sentence.spec, sentence.weights, origin=f"attention layer {number} of all-MiniLM-L6-v2")
        return (await self.service.loader.put(name, lambda: parsed)).layer


def installed_vocabulary() -> Vocabulary:
    """The layers of all-MiniLM-L6-v2, or what to install."""
    try:
        return Vocabulary(layers=minilm_layers(), note="all-MiniLM-L6-v2 is installed: its attention layers can be chosen.")
    except ModelNotInstalled as error:
        return Vocabulary(layers=[], note=str(error))


def _words_of(layer: LoadedLayer, sentence: Sentence, meaningful: bool, note: str) -> Words:
    """The reply of POST /words for a sentence."""
    reference = LayerReference(name=layer.name, fingerprint=layer.fingerprint)
    return Words(layer=reference, tokens=sentence.tokens, vectors=Base64Tensor.of(sentence.vectors), meaningful=meaningful, note=note)
