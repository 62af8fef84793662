"""Flags that several commands share, and flags generated from the fields of Settings."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
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

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        cast(Any, command).__signature__ = signature.replace(parameters=[*own, *map(_flag, names)])  # typeshed has no such attribute
        return command

    return decorate


def given(flags: Mapping[str, Any]) -> list[str]:
    """The flags that were given, with dashes."""
    return [f"--{name.replace('_', '-')}" for name, value in flags.items() if value is not None]


def _flag(name: str) -> inspect.Parameter:
    """The option for a field of Settings. Its default is None, so that the environment and the file can set the field."""
    field = Settings.model_fields[name]
    kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind in (int, float, bool)]
    default = "" if field.default in (None, {}) else f" (default {field.default})"
    option = typer.Option(help=escape(f"{field.description}{default}"), show_default=False)  # brackets would be markup
    annotation = Annotated[(kinds[0] if kinds else str) | None, option]  # type: ignore[valid-type]  # built at run time
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
