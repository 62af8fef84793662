"""`attend keys`: make, list and remove the keys of callers. A key is shown once; the file holds its SHA-256. A running server follows."""

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

File = Annotated[Path, typer.Option("--file", envvar="ATTEND_KEYS_FILE", help="The file that --keys-file of `attend serve` names.")]
Name = Annotated[str, typer.Argument(help="Who it is for; shown in the log.")]
Scopes = Annotated[list[str], typer.Option("--scope", help=f"What it opens: {', '.join(SCOPES)}. Several times, or with commas.")]


def install(app: typer.Typer) -> None:
    """Adds the commands."""
    keys = typer.Typer(no_args_is_help=True, help="Make, list and remove the keys of callers.", epilog=GROUP_EPILOG)
    keys.command("add", epilog=EPILOG)(add)
    keys.command("list", epilog="Example: attend keys list --file keys.txt --json")(show)
    keys.command("remove", epilog="Example: attend keys remove gateway --file keys.txt")(remove)
    app.add_typer(keys, name="keys")


def add(name: Name, scopes: Scopes, file: File, as_json: AsJson = False) -> None:
    """Make a key, print it once, and add its digest to the file."""
    held = _read(file) if file.exists() else []
    if any(key.name == name for key in held):
        _fail(f'"{name}" has a key already; remove it first, or take another name')
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
    """Take a key out of the file; a running server refuses it from its next request on."""
    held = _read(file)
    left = [key for key in held if key.name != name]
    if len(left) == len(held):
        _fail(f'no key of "{name}" in {file}')
    _write(file, left)
    _report({"removed": name}, f"{name} has no key any more", as_json)


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
