"""API keys with scopes: a file of digests, read again whenever it changes. `web/middleware/guard.py` says what each scope allows.

A line is `name scope,scope sha256-of-the-key`. Keys are made here, of 256 random bits, so that a plain digest is as good as a slow one:
nobody guesses them. Every line is compared, in constant time, whatever the ones before it said.
"""

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

SCOPES = ("infer", "admin", "metrics")  # call layers; change layers; read /metrics
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DIGEST = re.compile(r"[0-9a-f]{64}")
log = structlog.get_logger("attend")


class BadKeys(Exception):
    """A file of keys that cannot be read; the message names the file and the line, and nothing that stands there."""


@dataclass(frozen=True, slots=True)
class Key:
    """What is known of a key: not the key itself."""

    name: str
    scopes: frozenset[str]
    digest: str


def digest(key: str) -> str:
    """What stands in the file for a key."""
    return hashlib.sha256(key.encode("latin-1", "replace")).hexdigest()


def make_key(name: str, scopes: Collection[str]) -> tuple[str, Key]:
    """A new key, to be shown once, and what is kept of it. Raises BadKeys for a name or scope that cannot be."""
    if not NAME.fullmatch(name):
        raise BadKeys(f"expected a name of letters, digits and ._-, got {name!r}")
    if not scopes or not set(scopes) <= set(SCOPES):
        raise BadKeys(f"expected scopes among {', '.join(SCOPES)}, got {', '.join(scopes) or 'none'}")
    secret = f"attend-{secrets.token_urlsafe(32)}"
    return secret, Key(name, frozenset(scopes), digest(secret))


def read_keys(path: Path) -> list[Key]:
    """The keys of the file. Raises BadKeys."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadKeys(f"cannot read the keys file {path}: {getattr(error, 'strerror', 'it is no text')}") from None
    keys = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        scopes = frozenset(words[1].split(",")) if len(words) == 3 else frozenset()
        if not scopes or not scopes <= set(SCOPES) or not NAME.fullmatch(words[0]) or not DIGEST.fullmatch(words[2]):
            raise BadKeys(f"{path} line {number}: expected `name scope,scope sha256`, with scopes among {', '.join(SCOPES)}")
        keys.append(Key(words[0], scopes, words[2]))
    return keys


def write_keys(path: Path, keys: Iterable[Key]) -> None:
    """Replaces the file in one step, readable by its owner alone. Raises OSError."""
    text = "".join(f"{key.name} {','.join(sorted(key.scopes))} {key.digest}\n" for key in keys)
    beside = path.with_name(path.name + ".new")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    beside.replace(path)


class Keyring:
    """The keys of a file as they are now. A file that has become unreadable leaves the last good ones in force, and says so in the log."""

    def __init__(self, path: Path) -> None:
        """Raises BadKeys: a server does not start without knowing whom to let in."""
        self._path, self._keys = path, read_keys(path)
        self._state = self._look()

    def find(self, presented: str) -> Key | None:
        """Whose key this is; None for nobody's."""
        if (state := self._look()) != self._state:
            self._state = state
            try:
                self._keys = read_keys(self._path)
                log.info("keys read again", keys=[key.name for key in self._keys])
            except BadKeys as error:
                log.error("the keys stay as they were", error=str(error))
        found, presented_digest = None, digest(presented)
        for key in self._keys:
            if hmac.compare_digest(key.digest, presented_digest):
                found = key
        return found

    def _look(self) -> tuple[int, ...]:
        try:
            status = self._path.stat()
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_size, status.st_ino
