"""Text -> what a layer takes for it: the same two ways as `attend demo`, for the page and for anyone else who asks /words.

The layers of the real model, where it is installed, are made when they are first named, so that a server which nobody looks at pays
nothing for them. A layer that somebody else put under such a name is read like any other, by hash. Knows no HTTP.
"""

import asyncio

from service.errors import InvalidRequest
from service.serving.embeddings import NoModel, Sentence, hash_words, read_minilm
from service.serving.layers.registry import HeldLayer
from service.serving.requests import RawRequest
from service.serving.service import Service
from service.spec import fingerprint
from service.wire.problems import shown
from service.wire.schemas.attend import LayerReference
from service.wire.schemas.text import Vocabulary, Words, WordsRequest, base64_tensor

MEANT = "The weights are those of attention layer {} of all-MiniLM-L6-v2 (of 0 to {}), and the vectors what reaches it in that model."
MEANINGLESS = "This pattern means nothing: each word's vector is drawn from the word's own hash, which no layer learnt to read."
LARGEST = 1 << 21  # numbers of one answer
ONE_PROCESS = "The layers of all-MiniLM-L6-v2 are offered by a server with one worker only."


class TextEncoder:
    """Reads text for the layers of a service. `model` is whether the installed model's layers may be made here."""

    def __init__(self, service: Service, model: bool) -> None:
        self.service, self.model = service, model
        self._vocabulary: Vocabulary | None = None

    async def vocabulary(self) -> Vocabulary:
        """GET /words."""
        if self._vocabulary is None:
            self._vocabulary = await asyncio.to_thread(_installed) if self.model else Vocabulary(layers=[], note=ONE_PROCESS)
        return self._vocabulary

    async def read(self, raw: RawRequest) -> Words:
        """POST /words. Raises LayerNotFound, or InvalidRequest for text that has no words or too many."""
        request = await self.service.read(raw, WordsRequest)
        try:
            if request.layer in (names := (await self.vocabulary()).layers):
                number = names.index(request.layer)
                read = await asyncio.to_thread(read_minilm, request.text, number)
                layer = await self._held(request.layer, read)
                if layer.fingerprint == await asyncio.to_thread(fingerprint, read.spec, read.weights):
                    return await asyncio.to_thread(_words, layer, read, True, MEANT.format(number, len(names) - 1))
            layer = self.service.registry.find(request.layer)
            widths = {"query": layer.spec.query_dim, "key": layer.spec.key_dim, "value": layer.spec.value_dim}
            read = await asyncio.to_thread(hash_words, request.text, layer.spec, widths[request.part], LARGEST)
        except ValueError as error:
            expected, _, got = str(error).removeprefix("expected ").partition(", got ")
            raise InvalidRequest.where("/text", expected, got or shown(request.text)) from None
        return await asyncio.to_thread(_words, layer, read, False, MEANINGLESS)

    async def _held(self, name: str, read: Sentence) -> HeldLayer:
        """The layer of that name, whoever made it; made now where there is none."""
        held = {layer.name: layer for layer in self.service.registry.all()}
        return held[name] if name in held else (await self.service.loader.put(name, lambda: (read.spec, read.weights)))[0]


def _installed() -> Vocabulary:
    names: list[str] = []
    try:
        while True:  # until the model says that it has no such layer
            names.append(read_minilm("word", len(names)).layer)
    except ValueError:
        return Vocabulary(layers=names, note="all-MiniLM-L6-v2 is installed: its own attention layers can be looked at.")
    except NoModel as error:
        return Vocabulary(layers=[], note=str(error))


def _words(layer: HeldLayer, read: Sentence, meaningful: bool, note: str) -> Words:
    reference = LayerReference(name=layer.name, fingerprint=layer.fingerprint)
    return Words(layer=reference, tokens=read.tokens, vectors=base64_tensor(read.vectors), meaningful=meaningful, note=note)
