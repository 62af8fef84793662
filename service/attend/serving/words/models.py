"""The models whose layers /words and the demo offer, by the name that the names of their layers begin with."""

from attend.serving.words.minilm import MiniLM
from attend.serving.words.sentence import TextModel
from attend.serving.words.small import SmallModel

MODELS: dict[str, TextModel] = {"small": SmallModel(), "minilm": MiniLM()}
