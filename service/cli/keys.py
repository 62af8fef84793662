"""`attend keys`: make, list and remove API keys. A key is shown once; the file has its SHA-256. A running server reloads the file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from service.cli.exits import complain
from service.cli.flags import AsJson
from service.web.keys import SCOPES, BadKeys, Key, make_key, read_keys, write_keys

EPILOG = """Example: attend keys add gateway --scope infer --file keys.txt

attend serve --host 0.0.0.0 --keys-file keys.txt"""
GROUP_EPILOG = """Examples: attend keys add gateway --scope infer --file keys.txt

attend keys list --file keys.txt --json

attend keys remove gateway --file keys.txt"""

File = Annotated[Path, typer.Option("--file", envvar="ATTEND_KEYS_FILE", help="The keys file, as in `attend serve --keys-file`.")]
Name = Annotated[str, typer.Argument(help="Name of the key, shown in the log.")]
Scopes = Annotated[list[str], typer.Option("--scope", help=f"What the key allows: {', '.join(SCOPES)}; repeated, or separated by commas.")]


def install(app: typer.Typer) -> None:
    """Adds the commands."""
    keys = typer.Typer(no_args_is_help=True, help="Make, list and remove API keys.", epilog=GROUP_EPILOG)
    keys.command("add", epilog=EPILOG)(add)
    keys.command("list", epilog="Example: attend keys list --file keys.txt --json")(show)
    keys.command("remove", epilog="Example: attend keys remove gateway --file keys.txt")(remove)
    app.add_typer(keys, name="keys")


def add(name: Name, scopes: Scopes, file: File, as_json: AsJson = False) -> None:
    """Make a key, print it once, and add its digest to the file."""
    held = _read(file) if file.exists() else []
    if any(key.name == name for key in held):
        _fail(f'"{name}" already has a key; remove it first, or choose another name')
    try:
        secret, key = make_key(name, [scope.strip() for given in scopes for scope in given.split(",")])
    except BadKeys as error:
        _fail(str(error))
    _write(file, [*held, key])
    _report({"name": name, "scopes": sorted(key.scopes), "key": secret}, secret, as_json)


def show(file: File, as_json: AsJson = False) -> None:
    """List names and scopes."""
    held = _read(file)
    if as_json:
        typer.echo(json.dumps({"keys": [{"name": key.name, "scopes": sorted(key.scopes)} for key in held]}))
        return
    for key in held:
        typer.echo(f"{key.name}  {','.join(sorted(key.scopes))}")


def remove(name: Name, file: File, as_json: AsJson = False) -> None:
    """Remove a key from the file; a running server refuses it from the next request on."""
    held = _read(file)
    left = [key for key in held if key.name != name]
    if len(left) == len(held):
        _fail(f'{file} has no key named "{name}"')
    _write(file, left)
    _report({"removed": name}, f"key {name} removed", as_json)


def _report(document: Mapping[str, Any], words: str, as_json: bool) -> None:
    typer.echo(json.dumps(document) if as_json else words)


def _read(file: Path) -> list[Key]:
    try:
        return read_keys(file)
    except BadKeys as error:
        _fail(str(error), "" if file.exists() else "`attend keys add` makes it.")


def _write(file: Path, keys: list[Key]) -> None:
    try:
        write_keys(file, keys)
    except OSError as error:
        _fail(f"cannot write {file}: {error.strerror}")


def _fail(message: str, hint: str = "") -> NoReturn:
    complain("keys", message, hint)
    raise typer.Exit(1)
