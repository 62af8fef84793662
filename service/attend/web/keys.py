"""API keys with scopes: a file of digests, read again when it changes. `web/endpoints.py` defines what each scope allows.

A line is `name scope,scope sha256-of-the-key`. Keys have 256 random bits, so a fast digest is safe. A key is compared with every line, in
constant time.
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

from attend.errors import did_you_mean

SCOPES = ("infer", "admin", "metrics")  # call layers; change layers; read /metrics
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DIGEST = re.compile(r"[0-9a-f]{64}")
log = structlog.get_logger("attend")


class BadKeys(Exception):
    """A keys file that cannot be read. The message names the file and the line, and shows nothing of its content."""


@dataclass(frozen=True, slots=True)
class Key:
    """One line of the file. It has the digest of the key, not the key."""

    name: str
    scopes: frozenset[str]
    digest: str


def digest(key: str) -> str:
    """The SHA-256 of a key, as hexadecimal digits."""
    return hashlib.sha256(key.encode("latin-1", "replace")).hexdigest()


def make_key(name: str, scopes: Collection[str]) -> tuple[str, Key]:
    """A new secret, and its entry for the file. Raises BadKeys for an invalid name or scope."""
    if not NAME.fullmatch(name):
        raise BadKeys(f"expected a name of letters, digits and ._-, got {name!r}")
    if not scopes or not set(scopes) <= set(SCOPES):
        meant = "".join(did_you_mean(scope, SCOPES) for scope in scopes if scope not in SCOPES)
        raise BadKeys(f"expected scopes among {', '.join(SCOPES)}, got {', '.join(scopes) or 'none'}{meant}")
    secret = f"attend-{secrets.token_urlsafe(32)}"
    return secret, Key(name, frozenset(scopes), digest(secret))


def read_keys(path: Path) -> list[Key]:
    """The keys of the file. Raises BadKeys."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadKeys(f"cannot read the keys file {path}: {getattr(error, 'strerror', 'it is not text')}") from None
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
    """Replaces the file atomically; only its owner may read it. Raises OSError."""
    text = "".join(f"{key.name} {','.join(sorted(key.scopes))} {key.digest}\n" for key in keys)
    temporary = path.with_name(path.name + ".new")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    temporary.replace(path)


class Keyring:
    """The current keys of a file. If the file becomes unreadable, the last keys stay valid, and the log says so."""

    def __init__(self, path: Path) -> None:
        """Raises BadKeys."""
        self._path, self._keys = path, read_keys(path)
        self._state = self._stat()

    def find(self, presented: str) -> Key | None:
        """The entry of the presented key; None if it is unknown."""
        if (state := self._stat()) != self._state:
            self._state = state
            try:
                self._keys = read_keys(self._path)
                log.info("keys reloaded", keys=[key.name for key in self._keys])
            except BadKeys as error:
                log.error("keys not reloaded", error=str(error))
        found, presented_digest = None, digest(presented)
        for key in self._keys:
            if hmac.compare_digest(key.digest, presented_digest):
                found = key
        return found

    def _stat(self) -> tuple[int, ...]:
        try:
            status = self._path.stat()
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_size, status.st_ino
