"""Checks Host, Origin and API key of every request, as far as the settings require it.

Every page open in a user's browser can reach a server on the loopback address. A page whose name resolves to this server (DNS rebinding)
sends its own name as Host; a page of another origin that posts sends that origin as Origin. The guard refuses both. With a keyring it
refuses such pages because a browser adds no key by itself. It reads only headers; the endpoint says which scopes a key needs.
"""

import ipaddress
from collections.abc import Awaitable, Collection, Mapping

from attend.errors import Forbidden, MalformedRequest, Unauthenticated
from attend.web.endpoints import READ
from attend.web.keys import Keyring
from attend.web.requests import Handler, HttpRequest
from attend.wire.negotiation import HTML, JSON, accepted_type

KEY_HEADERS = ("authorization", "x-api-key")
SAFE_METHODS = frozenset({"GET", "HEAD"})


class Guard:
    """Middleware that checks Host, key and Origin. `hosts`: allowed Host names, besides localhost and addresses; None allows any."""

    def __init__(self, handle: Handler, hosts: Collection[str] | None, origins: Collection[str], keyring: Keyring | None) -> None:
        self.handle, self.hosts, self.origins, self.keyring = handle, hosts, frozenset(origins), keyring
        self._known: set[bytes] = set()  # Host headers that were allowed; at most 64

    def __call__(self, request: HttpRequest) -> Awaitable[None]:
        """Writes the name of the caller's key into the request. Raises MalformedRequest, Unauthenticated or Forbidden."""
        headers = request.headers
        host = headers.get(b"host", b"")
        if request.repeated or not host:
            _require_one_host(request)
        if self.hosts is not None and host not in self._known and host:
            self._require_host(host)
        if self.keyring is not None:
            request.api_key = self._key(request, self.keyring)
        elif b"origin" in headers and self.hosts is not None and request.method not in SAFE_METHODS:
            self._require_origin(headers[b"origin"].decode("latin-1"), host.decode("latin-1"))
        return self.handle(request)

    def _key(self, request: HttpRequest, keyring: Keyring) -> str:
        """The name of the caller's key, "" if none is needed. Any key may see that there is no endpoint."""
        endpoint = request.endpoint
        if endpoint is not None and endpoint.page and accepted_type(request.header(b"accept"), (JSON, HTML)) == HTML:
            return ""
        presented = {name: request.header(name.encode()) for name in KEY_HEADERS}
        return require_key(keyring, presented, READ if endpoint is None else endpoint.scopes)

    def _require_host(self, host: bytes) -> None:
        name = hostname(host.decode("latin-1"))
        if not _is_address(name) and name != "localhost" and name not in (self.hosts or ()):
            raise Forbidden.where("", "a Host that is an address, localhost, or among --allowed-hosts", f'"{name[:80]}"')
        if len(self._known) < 64:
            self._known.add(host)

    def _require_origin(self, origin: str, host: str) -> None:
        if origin.partition("://")[2] != host and self.origins.isdisjoint((origin, "*")):
            raise Forbidden.where("", "an Origin that is this server, or among --cors-origins", f'"{origin[:80]}"')


def _require_one_host(request: HttpRequest) -> None:
    """Raises MalformedRequest for several Host headers, of which a proxy may have used another, and in HTTP/1.1 for none."""
    count = sum(name == b"host" for name, _ in request.repeated) if request.repeated else int(b"host" in request.headers)
    if count > 1 or (count == 0 and request.scope["http_version"] == "1.1"):
        raise MalformedRequest.where("", "one Host header", f"{count or 'no'}")


def require_key(keyring: Keyring, headers: Mapping[str, str], scopes: frozenset[str]) -> str:
    """The name of the presented key; "" if `scopes` is empty. Raises Unauthenticated for a missing or unknown key, Forbidden for one with
    none of `scopes`."""
    if not scopes:
        return ""
    expected = "a key as `Authorization: Bearer …` or `X-API-Key`"
    scheme, _, token = headers.get("authorization", "").partition(" ")
    presented = (token if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip()
    if not presented:
        raise Unauthenticated.where("", expected, "none")
    if (key := keyring.find(presented)) is None:
        raise Unauthenticated.where("", expected, "an unknown key")
    if not key.scopes & scopes:
        expected = f"a key with the scope {' or '.join(sorted(scopes))}"
        raise Forbidden.where("", expected, f'"{key.name}" with {", ".join(sorted(key.scopes))}')
    return key.name


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
