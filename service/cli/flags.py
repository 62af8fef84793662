"""Flags that several commands share, and flags generated from the fields of Settings and of other models."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, cast, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.markup import escape

from service.client.connection import CA
from service.settings import LAYER_FIELDS, Settings

Url = Annotated[str | None, typer.Option(help="URL of a running server; without it, this process computes.", show_default=False)]
Ca = Annotated[
    Path | None,
    typer.Option(envvar=CA, help="CA bundle used to verify the server, a file or a folder.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Config = Annotated[Path | None, typer.Option(help="A TOML file of settings.", show_default=False)]

ENGINE_FIELDS = (*LAYER_FIELDS, "layers", "layers_dir", "device", "threads")


def with_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a command: adds a flag for each of these settings, passed as keyword arguments, None if not given."""
    return with_fields(Settings, *names)


def with_fields(model: type[BaseModel], *names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The same for the fields of any model."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        flags = [_flag(name, model.model_fields[name]) for name in names]
        cast(Any, command).__signature__ = signature.replace(parameters=[*own, *flags])  # typeshed has no such attribute
        return command

    return decorate


def given_flags(flags: Mapping[str, Any]) -> list[str]:
    """The flags that were given, with dashes."""
    return [f"--{name.replace('_', '-')}" for name, value in flags.items() if value is not None]


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    """The option for a field of a model. Its default is None, so that the environment and the file can set the field."""
    choices = get_args(field.annotation) or (field.annotation,)
    choices = tuple(get_args(choice)[0] if get_origin(choice) is Annotated else choice for choice in choices)
    kinds = [kind for kind in choices if kind in (int, float, bool)]
    names = [name for choice in choices for name in (choice, *get_args(choice)) if isinstance(name, str)]  # of a Literal
    text = str(field.description).replace("if null", "if not set")
    notes = [", ".join(names)] * (not all(name in text for name in names))
    notes += [] if field.default in (None, {}) else [f"default {field.default}"]
    option = typer.Option(help=escape(f"{text} ({'; '.join(notes)})" if notes else text), show_default=False)  # brackets would be markup
    annotation = Annotated[(kinds[0] if kinds else str) | None, option]  # type: ignore[valid-type]  # built at run time
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
