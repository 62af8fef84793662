"""Reads a model's config.json: which layer has which kind of attention, and its rotary embedding.

A `Config` records which fields were read. A field that was not read is refused, unless it is known to be about something else
(`unrelated_fields.py`): a field that a loader ignores is the usual cause of wrong results.
"""

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from attend.checkpoints.unrelated_fields import is_unrelated
from attend.errors import InvalidRequest
from attend.spec_parts import whole

MAX_SHOWN = 100  # characters of a value in a refusal
LARGEST = 1 << 31  # number in a config
HOW_TO_GO_ON = "if this field has no effect on attention, remove it from config.json"


class Config:
    """The fields of a config.json, or of one section of it (`text_config`), and the number and type of the layer that they are read for."""

    def __init__(self, fields: Mapping[str, Any], at: str = "/config", layer: int = 0) -> None:
        self.fields, self.at, self.layer = fields, at, layer
        self.layer_type = ""  # set once it is known
        self.read: set[str] = set()

    def with_fields(self, fields: Mapping[str, Any]) -> "Config":
        """The config with these fields replaced. Both configs share the record of fields that were read."""
        config = Config({**self.fields, **fields}, self.at, self.layer)
        config.read = self.read
        return config

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these fields that is there and not null; `default` if none is."""
        self.read.update(names)
        return next((self.fields[name] for name in names if self.fields.get(name) is not None), default)

    def ignore(self, *names: str) -> None:
        """Marks fields that have no effect here, or only under a condition that was read."""
        self.read.update(names)

    def count(self, *names: str, most: int = LARGEST, default: int | None = None) -> int:
        """A positive integer. Raises InvalidRequest if it is none, or absent without a default."""
        value = whole(self.get(*names, default=default))
        if type(value) is not int or not 0 < value <= most:
            raise self.refusal(names[0], f"an integer from 1 to {most}", value)
        return value

    def integers(self, name: str) -> list[int] | None:
        """A list of integers; None if it is something else."""
        items = self.get(name)
        numbers = [whole(item) for item in items] if isinstance(items, list) else []
        return numbers if numbers and all(type(number) is int for number in numbers) else None

    def number(self, *names: str, default: float | None = None) -> float:
        """A number. Raises InvalidRequest if it is none, or absent without a default."""
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
            raise self.refusal(names[0], "a number", value)
        return float(value)

    def flag(self, *names: str, default: bool | None = None) -> bool:
        """true or false. Raises InvalidRequest if it is neither, or absent without a default."""
        if not isinstance(value := self.get(*names, default=default), bool):
            raise self.refusal(names[0], "true or false", value)
        return value

    def of_layer(self, name: str, item: int | None = None) -> Any:
        """An item of a list, by default the layer's; None if the field is absent. Raises InvalidRequest if the list is too short."""
        n = self.layer if item is None else item
        if (items := self.get(name)) is None:
            return None
        if not isinstance(items, list) or n >= len(items):
            raise self.refusal(name, f"a list with an item for layer {n}", items)
        return items[n]

    def expect(self, name: str, *values: Any) -> None:
        """Raises InvalidRequest unless the field is absent, null or one of `values`."""
        value = self.get(name, default=values[0])
        if not any(value == wanted and isinstance(value, bool) == isinstance(wanted, bool) for wanted in values):
            raise self.refusal(name, " or ".join(map(brief, values)), value)

    def section(self, name: str) -> "Config | None":
        """A part of the config that is an object, such as `text_config`."""
        inner = self.get(name)
        return Config(inner, f"{self.at}/{name}") if isinstance(inner, Mapping) else None

    def refusal(self, name: str, expected: str, got: Any) -> InvalidRequest:
        return InvalidRequest.where(f"{self.at}/{name}", expected, "nothing" if got is None else brief(got))

    def require_all_read(self, irrelevant: str = "") -> None:
        """Raises InvalidRequest for a field that was not read and may change attention. `irrelevant`: names of others, with `*`."""
        family = f"{model_type}'s" if (model_type := self.fields.get("model_type")) else "the model's"
        for name, value in self.fields.items():
            is_known = name in self.read or is_unrelated(name, value) or any(fnmatchcase(name, pattern) for pattern in irrelevant.split())
            if not is_known:
                raise self.refusal(name, f"only fields that {family} attention reads, or that cannot change it; {HOW_TO_GO_ON}", value)


def brief(value: Any) -> str:
    """The value as JSON, at most MAX_SHOWN characters of it."""
    return json.dumps(value, default=str)[:MAX_SHOWN]
