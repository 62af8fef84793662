"""`attend keys`: make, list and remove API keys. A key is shown once; the file has its SHA-256. A running server reloads the file."""

from pathlib import Path
from typing import Annotated

import typer

from attend.cli.terminal import AsJson, fail, print_result
from attend.web.keys import SCOPES, BadKeys, Key, make_key, read_keys, write_keys

EPILOG = """\b
Examples:
  attend keys add gateway --scope infer --file keys.txt
  attend keys list --file keys.txt --json
  attend keys remove gateway --file keys.txt"""
ADD_EPILOG = """\b
Examples:
  attend keys add gateway --scope infer --file keys.txt
  attend serve --host 0.0.0.0 --keys-file keys.txt"""

File = Annotated[Path, typer.Option("--file", envvar="ATTEND_KEYS_FILE", help="The keys file, as in `attend serve --keys-file`.")]
Name = Annotated[str, typer.Argument(help="Name of the key, shown in the log.")]
Scopes = Annotated[list[str], typer.Option("--scope", help=f"What the key allows: {', '.join(SCOPES)}; repeated, or separated by commas.")]

group = typer.Typer(no_args_is_help=True, help="Make, list and remove API keys.", epilog=EPILOG)


@group.command("add", epilog=ADD_EPILOG)
def add(name: Name, scopes: Scopes, file: File, as_json: AsJson = False) -> None:
    """Make a key, print it once, and add its digest to the file."""
    keys = _read(file) if file.exists() else []
    if any(key.name == name for key in keys):
        fail("keys", f'"{name}" already has a key; remove it first, or choose another name')
    try:
        secret, key = make_key(name, [scope.strip() for text in scopes for scope in text.split(",")])
    except BadKeys as error:
        fail("keys", str(error), code=2)
    _write(file, [*keys, key])
    print_result({"name": name, "scopes": sorted(key.scopes), "key": secret}, secret, as_json)


@group.command("list", epilog="\b\nExample:\n  attend keys list --file keys.txt --json")
def show(file: File, as_json: AsJson = False) -> None:
    """List names and scopes."""
    keys = {key.name: sorted(key.scopes) for key in _read(file)}
    document = {"keys": [{"name": name, "scopes": scopes} for name, scopes in keys.items()]}
    if keys or as_json:
        print_result(document, "\n".join(f"{name}  {','.join(scopes)}" for name, scopes in keys.items()), as_json)


@group.command("remove", epilog="\b\nExample:\n  attend keys remove gateway --file keys.txt")
def remove(name: Name, file: File, as_json: AsJson = False) -> None:
    """Remove a key from the file; a running server refuses it from the next request on."""
    keys = _read(file)
    left = [key for key in keys if key.name != name]
    if len(left) == len(keys):
        fail("keys", f'{file} has no key named "{name}"')
    _write(file, left)
    print_result({"removed": name}, f"key {name} removed", as_json)


def _read(file: Path) -> list[Key]:
    try:
        return read_keys(file)
    except BadKeys as error:
        fail("keys", str(error), "" if file.exists() else "`attend keys add` makes it.", code=2)


def _write(file: Path, keys: list[Key]) -> None:
    try:
        write_keys(file, keys)
    except OSError as error:
        fail("keys", f"cannot write {file}: {error.strerror}")
