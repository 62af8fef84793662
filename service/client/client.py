"""Client: the synchronous client. `operations.py` makes its requests, `retries.py` decides on retries. See also `AsyncClient`."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from numpy.typing import ArrayLike

from service.client import operations
from service.client.connection import USE_CLIENT_DEFAULT, Connection, Timeout, Verify, connection_error
from service.client.operations import Operation
from service.client.responses import AnalysisResult, AttendResult, raise_for_status, read_ready
from service.client.retries import Attempts, Outcome, Retries
from service.errors import NotAcceptable, Unreachable, UnsupportedMediaType
from service.spec import LayerSpec
from service.tensors import Array
from service.wire.safetensors import read_tensors
from service.wire.schemas.attend import LayerDocument, Plan

T = TypeVar("T")


class Client:
    """One server, over connections that stay open. Threads and forked processes may share a client.

    A pickle has no API key: an unpickled client takes it from ATTEND_API_KEY. A deep copy is the client itself.

    Every method raises a refusal as the same exception of `service.errors` as in the server, with its problems (`at`, `expected`, `got`);
    `Unreachable` or its subclasses `TimedOut` and `Untrusted` if there was no response. Requests that fail in transit or find a full queue
    are repeated according to `retries`; changes of layers only if the server certainly did not begin them.
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
        """`timeout` in seconds limits one response and all retries; None is no limit. Every method has its own `timeout`.

        `api_key` is sent as a Bearer token, `headers` with every request. `Retries(times=0)` repeats nothing. `verify` is httpx's, or the
        file or folder of a CA bundle (OSError without certificates there); `transport` is httpx's.
        """
        self.base_url, self.timeout, self.retries = base_url, timeout, Retries.of(retries)
        self._connection, self._transport = Connection(base_url, timeout, api_key, dict(headers or {}), verify), transport
        self._open()

    def _open(self) -> None:
        self._binary = True  # until a server or proxy accepts only JSON
        try:
            self._opened, self._process = httpx.Client(**self._connection.options(), transport=self._transport), os.getpid()
        except httpx.InvalidURL as error:
            raise connection_error(error, self.base_url) from None

    @property
    def _http(self) -> httpx.Client:
        """The connections of this process. A forked process must not use its parent's: each could read the other's replies."""
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
        timeout: Timeout = USE_CLIENT_DEFAULT,
        **fields: Any,
    ) -> AttendResult:
        """Attention of `query` over `key` and `value`, [b, n, width] or [n, width]: arrays, torch tensors or nested lists.

        `fields` are the other fields of the request, such as `causal=True`, `attend_mask=…`, `outputs=["scores"]`, `select={"heads": [0]}`;
        None leaves a field out. Arrays have the layer's dtype, or that of `reply={"datatype": …}`.
        """
        return self.perform(operations.attend({"layer": layer, "query": query, "key": key, "value": value, **fields}), timeout)

    def analysis(
        self,
        query: ArrayLike,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        *,
        layer: str = "default",
        metrics: Sequence[str] | None = None,
        timeout: Timeout = USE_CLIENT_DEFAULT,
        **fields: Any,
    ) -> AnalysisResult:
        """Metrics of each head; `metrics` has their names, by default all cheap ones that these arguments suffice for.

        `fields` are those of `attend`, and `analysis={"local_window": …, "top_links": …}`, `direction=…`. Undefined numbers are NaN,
        undefined indices -1.
        """
        operation = operations.analysis({"layer": layer, "query": query, "key": key, "value": value, "metrics": metrics, **fields})
        return self.perform(operation, timeout)

    def plan(
        self,
        query: ArrayLike | Mapping[str, Any],
        key: ArrayLike | Mapping[str, Any] | None = None,
        value: ArrayLike | Mapping[str, Any] | None = None,
        *,
        layer: str = "default",
        timeout: Timeout = USE_CLIENT_DEFAULT,
        **fields: Any,
    ) -> Plan:
        """Shapes and cost of `attend` with the same arguments, and whether it is admitted. A tensor may be `{"shape": [2, 9, 64]}`."""
        return self.perform(operations.plan({"layer": layer, "query": query, "key": key, "value": value, **fields}), timeout)

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
        timeout: Timeout = USE_CLIENT_DEFAULT,
        **fields: Any,
    ) -> bytes:
        """A figure of the heads of `attend` with the same arguments: the bytes of a PNG, an SVG or an HTML page.

        `kind` is heads, head, mean, std, similarity or concatenation; `figure` has its other fields, such as
        `{"theme": "dark", "title": …, "heads": [0, 3]}`; `tokens={"query": […], "key": […]}` label the axes.
        """
        raw = {"kind": kind, "format": format, **(figure or {})}
        return self.perform(operations.figure({"layer": layer, "query": query, "key": key, "value": value, **fields}, raw), timeout)

    def layers(self, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> list[LayerDocument]:
        """All layers of the server."""
        return self.perform(operations.layers(), timeout)

    def layer(self, name: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> LayerDocument:
        """One layer: its spec with all defaults filled in, its fingerprint, its device."""
        return self.perform(operations.layer(name), timeout)

    def put_layer(
        self,
        name: str,
        spec: LayerSpec | Mapping[str, Any],
        weights: Mapping[str, ArrayLike] | None = None,
        *,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> LayerDocument:
        """Create or replace a layer, with weights by canonical name or drawn from the spec's `init` and `seed`."""
        return self.perform(operations.put_layer(name, spec, weights), timeout)

    def put_layer_file(
        self,
        name: str,
        file: bytes | str | Path,
        *,
        layout: str | None = None,
        prefix: str | None = None,
        spec: Mapping[str, Any] | None = None,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> LayerDocument:
        """Create or replace a layer from safetensors, a path or bytes: a result of `layer_file`, or a checkpoint.

        One layer of a checkpoint is read: `prefix` selects it if there are several, `layout` is needed if the names fit several frameworks,
        `spec` has what the tensors do not determine (`{"num_heads": 12}`).
        """
        body = file if isinstance(file, bytes) else Path(file).read_bytes()
        return self.perform(operations.put_layer_file(name, body, layout, prefix, spec), timeout)

    def put_layer_from(
        self,
        name: str,
        path: str | Path,
        layer: int,
        *,
        part: str | None = None,
        spec: Mapping[str, Any] | None = None,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> LayerDocument:
        """Create or replace a layer from a model's folder as `save_pretrained` writes it; the model's config.json decides what it computes.

        Only the tensors of layer number `layer` are read and sent. `part` is encoder, decoder or cross, where the model has several. `spec`
        has what no config says, such as `dtype`. Raises InvalidRequest for a model that the service cannot compute exactly.
        """
        body = operations.model_layer(path, layer, part)
        return self.perform(operations.put_layer_file(name, body, None, None, spec), timeout)

    def layer_file(self, name: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> bytes:
        """A layer as safetensors: weights by canonical name, its spec in the metadata."""
        return self.perform(operations.layer_file(name), timeout)

    def layer_weights(self, name: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> dict[str, Array]:
        """A layer's weights by canonical name, in its dtype; read-only views of the response."""
        return read_tensors(self.layer_file(name, timeout=timeout))[0]

    def delete_layer(self, name: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> None:
        """Remove a layer."""
        self.perform(operations.delete_layer(name), timeout)

    def ready(self, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> bool:
        """Whether the server responds and has loaded its layers."""
        try:
            return read_ready(self._exchange(operations.ready(), timeout))
        except Unreachable:
            return False

    def perform(self, operation: Operation[T], timeout: Timeout = USE_CLIENT_DEFAULT) -> T:
        """Send an operation and read its response; with a JSON body once a server or proxy has refused safetensors."""
        if operation.fallback is None:
            return operation.read(self.send(operation, timeout))
        if self._binary:
            try:
                return operation.read(self.send(operation, timeout))
            except (UnsupportedMediaType, NotAcceptable):
                self._binary = False
        return self.perform(operation.as_json(), timeout)

    def send(self, operation: Operation[Any], timeout: Timeout = USE_CLIENT_DEFAULT) -> httpx.Response:
        """Send an operation. Raises for any status but success, as every method does."""
        return raise_for_status(self._exchange(operation, timeout))

    def _exchange(self, operation: Operation[Any], timeout: Timeout) -> httpx.Response:
        seconds = self.timeout if timeout is USE_CLIENT_DEFAULT else timeout
        attempts = Attempts(self.retries, operation, seconds)
        while (delay := attempts.next_delay(outcome := self._once(operation, seconds))) is not None:
            time.sleep(delay)
        if isinstance(outcome, Exception):
            raise connection_error(outcome, self.base_url) from outcome
        return outcome

    def _once(self, operation: Operation[Any], seconds: float | None) -> Outcome:
        try:
            return self._http.request(operation.method, operation.path, content=operation.body, headers=operation.headers, timeout=seconds)
        except (httpx.RequestError, httpx.InvalidURL) as error:
            return error

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __getstate__(self) -> dict[str, Any]:
        if self._transport is not None:
            raise TypeError("a client with a transport cannot be pickled")
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
