"""AsyncClient: `Client` for code that does not wait. The same methods, the same words, one `await` each; both send what `calls.py` writes.

Arrays are written and read where the event loop runs: moving megabytes of memory takes less than a thread's way there and back.
"""

import asyncio
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


class AsyncClient:
    """One server, over connections that are kept open; belongs to one event loop. Raises, and sends again, as `Client` does."""

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        timeout: float | None = 60.0,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        retries: Retries | int | None = None,
        verify: Verify = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """As those of `Client`."""
        self.base_url, self.timeout, self.retries = base_url, timeout, as_retries(retries)
        self._binary = True
        connection = Connection(base_url, timeout, api_key, dict(headers or {}), verify)
        try:
            self._http = httpx.AsyncClient(**connection.options(), transport=transport)
        except httpx.InvalidURL as error:
            raise connection_failure(error, base_url) from None

    async def attend(
        self,
        query: ArrayLike,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        *,
        layer: str = "default",
        timeout: Timeout = CLIENTS,
        **fields: Any,
    ) -> AttendResult:
        """As `Client.attend`."""
        return await self.ask(calls.attend({"layer": layer, "query": query, "key": key, "value": value, **fields}), timeout)

    async def analysis(
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
        """As `Client.analysis`."""
        call = calls.analysis({"layer": layer, "query": query, "key": key, "value": value, "metrics": metrics, **fields})
        return await self.ask(call, timeout)

    async def plan(
        self,
        query: ArrayLike | Mapping[str, Any],
        key: ArrayLike | Mapping[str, Any] | None = None,
        value: ArrayLike | Mapping[str, Any] | None = None,
        *,
        layer: str = "default",
        timeout: Timeout = CLIENTS,
        **fields: Any,
    ) -> Plan:
        """As `Client.plan`."""
        return await self.ask(calls.plan({"layer": layer, "query": query, "key": key, "value": value, **fields}), timeout)

    async def figure(
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
        """As `Client.figure`."""
        raw = {"kind": kind, "format": format, **(figure or {})}
        return await self.ask(calls.figure({"layer": layer, "query": query, "key": key, "value": value, **fields}, raw), timeout)

    async def layers(self, *, timeout: Timeout = CLIENTS) -> list[LayerDocument]:
        """As `Client.layers`."""
        return await self.ask(calls.layers(), timeout)

    async def layer(self, name: str, *, timeout: Timeout = CLIENTS) -> LayerDocument:
        """As `Client.layer`."""
        return await self.ask(calls.layer(name), timeout)

    async def put_layer(
        self,
        name: str,
        spec: LayerSpec | Mapping[str, Any],
        weights: Mapping[str, ArrayLike] | None = None,
        *,
        timeout: Timeout = CLIENTS,
    ) -> LayerDocument:
        """As `Client.put_layer`."""
        return await self.ask(calls.put_layer(name, spec, weights), timeout)

    async def put_layer_file(
        self,
        name: str,
        file: bytes | str | Path,
        *,
        layout: str | None = None,
        prefix: str | None = None,
        spec: Mapping[str, Any] | None = None,
        timeout: Timeout = CLIENTS,
    ) -> LayerDocument:
        """As `Client.put_layer_file`."""
        body = file if isinstance(file, bytes) else await asyncio.to_thread(Path(file).read_bytes)
        return await self.ask(calls.put_layer_file(name, body, layout, prefix, spec), timeout)

    async def layer_file(self, name: str, *, timeout: Timeout = CLIENTS) -> bytes:
        """As `Client.layer_file`."""
        return await self.ask(calls.layer_file(name), timeout)

    async def layer_weights(self, name: str, *, timeout: Timeout = CLIENTS) -> dict[str, Array]:
        """As `Client.layer_weights`."""
        return read_tensors(await self.layer_file(name, timeout=timeout))[0]

    async def delete_layer(self, name: str, *, timeout: Timeout = CLIENTS) -> None:
        """As `Client.delete_layer`."""
        await self.ask(calls.delete_layer(name), timeout)

    async def ready(self, *, timeout: Timeout = CLIENTS) -> bool:
        """As `Client.ready`."""
        try:
            return calls.read_ready(await self._exchange(calls.ready(), timeout))
        except Unreachable:
            return False

    async def ask(self, call: Call[T], timeout: Timeout = CLIENTS) -> T:
        """As `Client.ask`."""
        if call.plain is None:
            return call.read(await self.send(call, timeout))
        if self._binary:
            try:
                return call.read(await self.send(call, timeout))
            except (UnsupportedMediaType, NotAcceptable):
                self._binary = False
        return await self.ask(call.in_json(), timeout)

    async def send(self, call: Call[Any], timeout: Timeout = CLIENTS) -> httpx.Response:
        """As `Client.send`."""
        return calls.checked(await self._exchange(call, timeout))

    async def _exchange(self, call: Call[Any], timeout: Timeout) -> httpx.Response:
        seconds = self.timeout if timeout is CLIENTS else timeout
        attempts = self.retries.begin(call, seconds)
        while (pause := attempts.pause(outcome := await self._once(call, seconds))) is not None:
            await asyncio.sleep(pause)
        if isinstance(outcome, Exception):
            raise connection_failure(outcome, self.base_url) from outcome
        return outcome

    async def _once(self, call: Call[Any], seconds: float | None) -> Outcome:
        try:
            return await self._http.request(call.method, call.path, content=call.body, headers=call.headers, timeout=seconds)
        except (httpx.RequestError, httpx.InvalidURL) as error:
            return error

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()
