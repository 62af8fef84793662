"""Admits requests: with a keyring, those with a key of the right scope; without, all but those of other sites' pages.

Every page open in a user's browser can reach a server on the loopback address. A page whose name resolves to this server (DNS rebinding)
sends its own name as Host; a page of another origin that posts sends that origin as Origin. The guard refuses both. With a keyring it
refuses such pages because a browser adds no key by itself. It reads only headers; settings that require no check create no Guard.
"""

import ipaddress
import re
from collections.abc import Collection, Mapping

from service.errors import Forbidden, MalformedRequest, Unauthenticated
from service.web.keys import Keyring
from service.web.records import HttpRecord
from service.wire.negotiation import HTML, JSON, accepted_type

KEY_HEADERS = ("authorization", "x-api-key")
SAFE_METHODS = frozenset({"GET", "HEAD"})
SESSION_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE"})
ANY_SCOPE = frozenset({"infer", "admin", "metrics"})
CALL_PATHS = r"/attend(/[a-z]+)?|/words|/v2/models/[^/]+(/versions/[^/]+)?/infer"
RULES: tuple[tuple[frozenset[str], re.Pattern[str], frozenset[str]], ...] = (  # the first match decides: a key needs one of its scopes
    (SAFE_METHODS, re.compile(r"/(v2/)?health/(live|ready|startup)"), frozenset()),
    (SAFE_METHODS, re.compile(r"/page/[^/]+"), frozenset()),  # the page's files, without any data
    (SAFE_METHODS, re.compile(r"/metrics"), frozenset({"metrics"})),
    (SESSION_METHODS, re.compile(r"/sessions(/.*)?"), frozenset({"infer"})),
    (SAFE_METHODS, re.compile(r".*"), ANY_SCOPE),
    (frozenset({"POST"}), re.compile(r"/v2/repository/index"), ANY_SCOPE),  # reads layers, as GET /layers does
    (frozenset({"POST"}), re.compile(CALL_PATHS), frozenset({"infer"})),
)
ADMIN_SCOPE = frozenset({"admin"})  # for requests that no rule matches


class Guard:
    """Checks Host, key and Origin. `hosts`: allowed Host names, besides localhost and addresses; None allows any."""

    def __init__(self, hosts: Collection[str] | None, origins: Collection[str], keyring: Keyring | None) -> None:
        self.hosts, self.origins, self.keyring = hosts, frozenset(origins), keyring
        self._known: set[bytes] = set()  # Host headers that were allowed; at most 64

    def check(self, record: HttpRecord, http_version: str) -> str:
        """The name of the caller's key, "" if none is needed. Raises MalformedRequest, Unauthenticated or Forbidden."""
        headers, path, method = record.headers, record.path, record.method
        host = headers.get(b"host", b"")
        if record.repeated or not host:
            _require_one_host(record, http_version)
        if self.hosts is not None and host not in self._known and host:
            self._require_host(host)
        if self.keyring is not None:
            is_page = path == "/" and accepted_type(record.header(b"accept"), (JSON, HTML)) == HTML
            presented = {name: record.header(name.encode()) for name in KEY_HEADERS}
            return "" if is_page else require_key(self.keyring, presented, scopes_for("GET" if method == "HEAD" else method, path))
        if b"origin" in headers and self.hosts is not None and method not in SAFE_METHODS:
            self._require_origin(headers[b"origin"].decode("latin-1"), host.decode("latin-1"))
        return ""

    def _require_host(self, host: bytes) -> None:
        name = hostname(host.decode("latin-1"))
        if not _is_address(name) and name != "localhost" and name not in (self.hosts or ()):
            raise Forbidden.where("", "a Host that is an address, localhost, or among --allowed-hosts", f'"{name[:80]}"')
        if len(self._known) < 64:
            self._known.add(host)

    def _require_origin(self, origin: str, host: str) -> None:
        if origin.partition("://")[2] != host and self.origins.isdisjoint((origin, "*")):
            raise Forbidden.where("", "an Origin that is this server, or among --cors-origins", f'"{origin[:80]}"')


def _require_one_host(record: HttpRecord, http_version: str) -> None:
    """Raises MalformedRequest for several Host headers, of which a proxy may have used another, and in HTTP/1.1 for none."""
    count = sum(name == b"host" for name, _ in record.repeated) if record.repeated else int(b"host" in record.headers)
    if count > 1 or (count == 0 and http_version == "1.1"):
        raise MalformedRequest.where("", "one Host header", f"{count or 'no'}")


def require_key(keyring: Keyring, headers: Mapping[str, str], scopes: frozenset[str]) -> str:
    """The name of the presented key; "" if `scopes` is empty. Raises Unauthenticated for a missing or unknown key, Forbidden for one with
    none of `scopes`."""
    if not scopes:
        return ""
    expected = "a key as `Authorization: Bearer …` or `X-API-Key`"
    kind, _, token = headers.get("authorization", "").partition(" ")
    presented = (token if kind.lower() == "bearer" else headers.get("x-api-key", "")).strip()
    if not presented:
        raise Unauthenticated.where("", expected, "none")
    if (key := keyring.find(presented)) is None:
        raise Unauthenticated.where("", expected, "an unknown key")
    if not key.scopes & scopes:
        expected = f"a key with the scope {' or '.join(sorted(scopes))}"
        raise Forbidden.where("", expected, f'"{key.name}" with {", ".join(sorted(key.scopes))}')
    return key.name


def scopes_for(method: str, path: str) -> frozenset[str]:
    """The scopes of which a key must have one; empty if no key is needed."""
    return next((scopes for methods, pattern, scopes in RULES if method in methods and pattern.fullmatch(path)), ADMIN_SCOPE)


def hostname(host: str) -> str:
    """A Host header without its port, in lower case, an IPv6 address without its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if host.rpartition(":")[2].isdigit() and ":" in host else host.lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
