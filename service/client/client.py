"""Client: the service as a Python object, for code that waits for its answers. Sends and receives; what is said stands in `calls.py`,
when it is said again in `retries.py`. `AsyncClient` is the same for code that does not wait, method by method.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from numpy.typing import ArrayLike

from service.client import calls
from service.client.calls import Call
from service.client.connection import CLIENTS, Connection, Timeout, Verify
from service.client.failures import connection_failure
from service.client.result import AnalysisResult, AttendResult
from service.client.retries import Outcome, Retries, as_retries
from service.errors import NotAcceptable, Unreachable, UnsupportedMediaType
from service.spec import LayerSpec
from service.tensors import Array
from service.wire.safetensors import read_tensors
from service.wire.schemas.attend import LayerDocument, Plan

T = TypeVar("T")


class Client:
    """One server, over connections that are kept open. May be shared by threads and by processes that they fork, and pickled: what is
    unpickled takes its key from ATTEND_API_KEY, since none is in the pickle. A deep copy is the client itself.

    Every method raises what the server raised, from the tree in `service.errors` with its problems (`at`, `expected`, `got`), and
    `Unreachable` or its kinds `TimedOut` and `Untrusted` where no answer came. What failed on the way, or found a full queue, is sent
    again as `retries` says; a change of layers only where the first one was surely not begun.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        timeout: float | None = 60.0,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        retries: Retries | int | None = None,
        verify: Verify = True,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`timeout` is in seconds, None waits for ever: for each answer, and after it nothing is sent again. Every method takes its own.

        `api_key` is sent as Bearer; `headers` go with every call; `Retries(times=0)` sends everything once; `verify` is the file or folder
        of the certificates to believe in (OSError where there are none), or httpx's; `transport` is httpx's, for tests and proxies.
        """
        self.base_url, self.timeout, self.retries = base_url, timeout, as_retries(retries)
        self._connection, self._transport = Connection(base_url, timeout, api_key, dict(headers or {}), verify), transport
        self._open()

    def _open(self) -> None:
        self._binary = True  # until something on the way takes JSON alone
        try:
            self._opened, self._process = httpx.Client(**self._connection.options(), transport=self._transport), os.getpid()
        except httpx.InvalidURL as error:
            raise connection_failure(error, self.base_url) from None

    @property
    def _http(self) -> httpx.Client:
        """This process's own: over a parent's connections its replies would reach the wrong one of the two."""
        if self._process != os.getpid():
            self._open()
        return self._opened

    def attend(
        self,
        query: ArrayLike,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        *,
        layer: str = "default",
        timeout: Timeout = CLIENTS,
        **fields: Any,
    ) -> AttendResult:
        """Attention of `query` over `key` and `value`, [b, n, width] or [n, width]: arrays, torch's tensors, nested lists.

        `fields` are those of the request, such as `causal=True`, `attend_mask=…`, `outputs=["scores"]`, `select={"heads": [0]}`; None is
        the same as left out. Arrays come back in the layer's dtype, or the one `reply={"datatype": …}` names.
        """
        return self.ask(calls.attend({"layer": layer, "query": query, "key": key, "value": value, **fields}), timeout)

    def analysis(
        self,
        query: ArrayLike,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        *,
        layer: str = "default",
        metrics: Sequence[str] | None = None,
        timeout: Timeout = CLIENTS,
        **fields: Any,
    ) -> AnalysisResult:
        """What each head does: `metrics` by name, or the cheap ones that the arguments give enough for.

        `fields` are those of `attend`, and `analysis={"local_window": …, "top_links": …}`, `direction=…`. What is not defined is NaN; an
        index that is not there is -1.
        """
        call = calls.analysis({"layer": layer, "query": query, "key": key, "value": value, "metrics": metrics, **fields})
        return self.ask(call, timeout)

    def plan(
        self,
        query: ArrayLike | Mapping[str, Any],
        key: ArrayLike | Mapping[str, Any] | None = None,
        value: ArrayLike | Mapping[str, Any] | None = None,
        *,
        layer: str = "default",
        timeout: Timeout = CLIENTS,
        **fields: Any,
    ) -> Plan:
        """What `attend` with the same arguments would reply, cost, and whether it is admitted. `{"shape": [2, 9, 64]}` is a tensor too."""
        return self.ask(calls.plan({"layer": layer, "query": query, "key": key, "value": value, **fields}), timeout)

    def figure(
        self,
        query: ArrayLike,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        *,
        kind: str = "heads",
        format: str = "png",
        layer: str = "default",
        figure: Mapping[str, Any] | None = None,
        timeout: Timeout = CLIENTS,
        **fields: Any,
    ) -> bytes:
        """A picture of what `attend` with the same arguments computes: the bytes of a PNG, an SVG or an HTML page.

        `kind` is heads, head, mean, std, similarity or concatenation; `figure` takes what else a picture can be told, such as
        `{"theme": "dark", "title": …, "heads": [0, 3]}`; `tokens={"query": […], "key": […]}` are its words.
        """
        raw = {"kind": kind, "format": format, **(figure or {})}
        return self.ask(calls.figure({"layer": layer, "query": query, "key": key, "value": value, **fields}, raw), timeout)

    def layers(self, *, timeout: Timeout = CLIENTS) -> list[LayerDocument]:
        """The layers that the server holds."""
        return self.ask(calls.layers(), timeout)

    def layer(self, name: str, *, timeout: Timeout = CLIENTS) -> LayerDocument:
        """One layer: its spec with all defaults filled in, its fingerprint, where it lives."""
        return self.ask(calls.layer(name), timeout)

    def put_layer(
        self,
        name: str,
        spec: LayerSpec | Mapping[str, Any],
        weights: Mapping[str, ArrayLike] | None = None,
        *,
        timeout: Timeout = CLIENTS,
    ) -> LayerDocument:
        """Makes or replaces a layer: drawn by the spec's `init` and `seed`, or with these weights under their canonical names."""
        return self.ask(calls.put_layer(name, spec, weights), timeout)

    def put_layer_file(
        self,
        name: str,
        file: bytes | str | Path,
        *,
        layout: str | None = None,
        prefix: str | None = None,
        spec: Mapping[str, Any] | None = None,
        timeout: Timeout = CLIENTS,
    ) -> LayerDocument:
        """Makes or replaces a layer from safetensors, by path or as bytes: what `layer_file` gave, or a checkpoint.

        Of a checkpoint one layer is taken: `prefix` names it where there are several, `layout` says whose names they are where those do
        not tell, `spec` what tensors cannot tell (`{"num_heads": 12}`).
        """
        body = file if isinstance(file, bytes) else Path(file).read_bytes()
        return self.ask(calls.put_layer_file(name, body, layout, prefix, spec), timeout)

    def layer_file(self, name: str, *, timeout: Timeout = CLIENTS) -> bytes:
        """A layer as safetensors: its weights under their canonical names, its spec in the metadata."""
        return self.ask(calls.layer_file(name), timeout)

    def layer_weights(self, name: str, *, timeout: Timeout = CLIENTS) -> dict[str, Array]:
        """A layer's weights by canonical name, in its dtype; read-only, over the memory of the reply."""
        return read_tensors(self.layer_file(name, timeout=timeout))[0]

    def delete_layer(self, name: str, *, timeout: Timeout = CLIENTS) -> None:
        """Removes a layer."""
        self.ask(calls.delete_layer(name), timeout)

    def ready(self, *, timeout: Timeout = CLIENTS) -> bool:
        """Whether a server answers there and has loaded its layers."""
        try:
            return calls.read_ready(self._exchange(calls.ready(), timeout))
        except Unreachable:
            return False

    def ask(self, call: Call[T], timeout: Timeout = CLIENTS) -> T:
        """Sends a call and reads its answer; in JSON where what it was written in is not taken."""
        if call.plain is None:
            return call.read(self.send(call, timeout))
        if self._binary:
            try:
                return call.read(self.send(call, timeout))
            except (UnsupportedMediaType, NotAcceptable):
                self._binary = False
        return self.ask(call.in_json(), timeout)

    def send(self, call: Call[Any], timeout: Timeout = CLIENTS) -> httpx.Response:
        """Sends any call. Raises the refusal where the response is one."""
        return calls.checked(self._exchange(call, timeout))

    def _exchange(self, call: Call[Any], timeout: Timeout) -> httpx.Response:
        seconds = self.timeout if timeout is CLIENTS else timeout
        attempts = self.retries.begin(call, seconds)
        while (pause := attempts.pause(outcome := self._once(call, seconds))) is not None:
            time.sleep(pause)
        if isinstance(outcome, Exception):
            raise connection_failure(outcome, self.base_url) from outcome
        return outcome

    def _once(self, call: Call[Any], seconds: float | None) -> Outcome:
        try:
            return self._http.request(call.method, call.path, content=call.body, headers=call.headers, timeout=seconds)
        except (httpx.RequestError, httpx.InvalidURL) as error:
            return error

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def __getstate__(self) -> dict[str, Any]:
        if self._transport is not None:
            raise TypeError("a client that was given a transport cannot be pickled; make one where it is wanted")
        return {"base_url": self.base_url, "timeout": self.timeout, "retries": self.retries, "_connection": self._connection}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _transport=None)
        self._open()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
