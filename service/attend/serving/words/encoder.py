"""GET and POST /words: the words of a text as vectors, which can be sent to a layer as its input.

The layers of a model are loaded on first use. A layer with such a name but other weights gets hashed vectors, as all other layers do.
"""

from functools import partial

from attend.errors import InvalidRequest
from attend.fingerprint import fingerprint
from attend.serving.codec_pool import LARGE_BYTES
from attend.serving.layer_requests import read_body
from attend.serving.layers.files import ParsedLayer
from attend.serving.layers.registry import LoadedLayer
from attend.serving.requests import Request
from attend.serving.service import Service
from attend.serving.words.hashed import hash_words
from attend.serving.words.models import MODELS
from attend.serving.words.sentence import HeadEffects, InvalidText, ModelNotInstalled, Sentence, TextModel
from attend.wire.problems import describe_value
from attend.wire.schemas.schema import LayerReference
from attend.wire.schemas.tensors import Base64Tensor
from attend.wire.schemas.words import Effects, ModelLayers, Vocabulary, Words, WordsRequest

MAX_NUMBERS = 1 << 21  # of one reply
WORK_BYTES = LARGE_BYTES  # reading a model takes as long as a large body, in whose thread it runs
ONE_WORKER_NOTE = "Only a server with one worker offers the layers of trained models."


class TextEncoder:
    """Tokens and vectors for the layers of a service. `models`: whether layers of models may be loaded."""

    def __init__(self, service: Service, models: bool) -> None:
        self.service, self.models = service, models
        self._vocabulary: Vocabulary | None = None

    async def vocabulary(self) -> Vocabulary:
        """GET /words."""
        if self._vocabulary is None:
            if not self.models:
                return Vocabulary(models=[], note=ONE_WORKER_NOTE)
            self._vocabulary = await self.service.engine.codecs.run(installed_vocabulary, WORK_BYTES, "")
        return self._vocabulary

    async def reply(self, request: Request) -> str:
        """POST /words, as JSON. Raises LayerNotFound, or InvalidRequest for text without words or with too many.

        One job makes the vectors and writes them, so that none wait for a thread in memory that nobody has reserved.
        """
        body = await read_body(self.service, request, WordsRequest)
        run = partial(self.service.engine.run, request, WORK_BYTES)
        try:
            if (found := await self._model_of(body.layer)) is not None:
                model, number = found
                sentence = await run(model.read, body.text, number)
                layer = await self._layer_of(sentence, request)
                if layer.fingerprint == await run(fingerprint, sentence.spec, sentence.weights):
                    effects = await run(model.effects, body.text) if body.effects else None
                    return await run(_written, layer, sentence, effects)
            layer = self.service.registry.find(body.layer, at="/layer")
            widths = {"query": layer.spec.query_dim, "key": layer.spec.key_dim, "value": layer.spec.value_dim}
            return await run(_hashed, layer, body.text, widths[body.part])
        except InvalidText as error:
            raise InvalidRequest.where("/text", error.expected, error.got or describe_value(body.text)) from None

    async def _model_of(self, name: str) -> tuple[TextModel, int] | None:
        """The model that has a layer, and the layer's number in it; None for other layers."""
        for listed in (await self.vocabulary()).models:
            if name in listed.layers:
                return next(model for model in MODELS.values() if model.title == listed.title), listed.layers.index(name)
        return None

    async def _layer_of(self, sentence: Sentence, request: Request) -> LoadedLayer:
        """The layer of that name; loaded with the weights in `sentence` if the registry has none."""
        if (layer := self.service.registry.get(sentence.layer)) is not None:
            return layer
        parsed = ParsedLayer(sentence.spec, sentence.weights, origin=sentence.origin)
        return (await self.service.loader.put(sentence.layer, lambda: parsed, request.deadline)).layer


def installed_vocabulary() -> Vocabulary:
    """The models whose layers can be chosen, and what to install for the others."""
    models, notes = [], []
    for model in MODELS.values():
        try:
            names = model.layers()
            models.append(ModelLayers(title=model.title, layers=names, first=names[model.telling_layer], options=dict(model.options)))
        except ModelNotInstalled as error:
            notes.append(str(error))
    return Vocabulary(models=models, note=" ".join(notes))


def _hashed(layer: LoadedLayer, text: str, width: int) -> str:
    """The reply for the vectors of hashes. Raises InvalidText."""
    return _written(layer, hash_words(text, layer.spec, width, MAX_NUMBERS))


def _written(layer: LoadedLayer, sentence: Sentence, effects: HeadEffects | None = None) -> str:
    """The reply of POST /words for a sentence. Only the layers of models have weights of their own."""
    words = Words(
        layer=LayerReference(name=layer.name, fingerprint=layer.fingerprint),
        tokens=sentence.tokens,
        vectors=Base64Tensor.of(sentence.vectors),
        meaningful=bool(sentence.weights),
        note=sentence.note,
        options=dict(sentence.options),
        heads=list(sentence.heads),
        effects=None
        if effects is None
        else Effects(answer=effects.answer, probability=effects.probability, change=effects.change.tolist()),
    )
    return words.model_dump_json()
