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
from service.client.connection import options
from service.client.failures import connection_failure
from service.client.result import AnalysisResult, AttendResult
from service.client.retries import Outcome, Retries, as_retries
from service.errors import NotAcceptable, Unreachable, UnsupportedMediaType
from service.spec import LayerSpec
from service.tensors import Array
from service.wire.documents import LayerDocument, Plan
from service.wire.safetensors_form import read_tensors

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
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """As those of `Client`."""
        self.base_url, self.timeout, self.retries = base_url, timeout, as_retries(retries)
        self._binary = True
        try:
            self._http = httpx.AsyncClient(**options(base_url, timeout, api_key, headers), transport=transport)
        except httpx.InvalidURL as error:
            raise connection_failure(error, base_url) from None

    async def attend(
        self,
        query: ArrayLike,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        *,
        layer: str = "default",
        **fields: Any,
    ) -> AttendResult:
        """As `Client.attend`."""
        return await self.ask(calls.attend({"layer": layer, "query": query, "key": key, "value": value, **fields}))

    async def analysis(
        self,
        query: ArrayLike,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        *,
        layer: str = "default",
        metrics: Sequence[str] | None = None,
        **fields: Any,
    ) -> AnalysisResult:
        """As `Client.analysis`."""
        return await self.ask(calls.analysis({"layer": layer, "query": query, "key": key, "value": value, "metrics": metrics, **fields}))

    async def plan(
        self,
        query: ArrayLike | Mapping[str, Any],
        key: ArrayLike | Mapping[str, Any] | None = None,
        value: ArrayLike | Mapping[str, Any] | None = None,
        *,
        layer: str = "default",
        **fields: Any,
    ) -> Plan:
        """As `Client.plan`."""
        return await self.ask(calls.plan({"layer": layer, "query": query, "key": key, "value": value, **fields}))

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
        **fields: Any,
    ) -> bytes:
        """As `Client.figure`."""
        asked = {"kind": kind, "format": format, **(figure or {})}
        return await self.ask(calls.figure({"layer": layer, "query": query, "key": key, "value": value, **fields}, asked))

    async def layers(self) -> list[LayerDocument]:
        """As `Client.layers`."""
        return await self.ask(calls.layers())

    async def layer(self, name: str) -> LayerDocument:
        """As `Client.layer`."""
        return await self.ask(calls.layer(name))

    async def put_layer(
        self, name: str, spec: LayerSpec | Mapping[str, Any], weights: Mapping[str, ArrayLike] | None = None
    ) -> LayerDocument:
        """As `Client.put_layer`."""
        return await self.ask(calls.put_layer(name, spec, weights))

    async def put_layer_file(
        self,
        name: str,
        file: bytes | str | Path,
        *,
        layout: str | None = None,
        prefix: str | None = None,
        spec: Mapping[str, Any] | None = None,
    ) -> LayerDocument:
        """As `Client.put_layer_file`."""
        body = file if isinstance(file, bytes) else await asyncio.to_thread(Path(file).read_bytes)
        return await self.ask(calls.put_layer_file(name, body, layout, prefix, spec))

    async def layer_file(self, name: str) -> bytes:
        """As `Client.layer_file`."""
        return await self.ask(calls.layer_file(name))

    async def layer_weights(self, name: str) -> dict[str, Array]:
        """As `Client.layer_weights`."""
        return read_tensors(await self.layer_file(name))[0]

    async def delete_layer(self, name: str) -> None:
        """As `Client.delete_layer`."""
        await self.ask(calls.delete_layer(name))

    async def ready(self) -> bool:
        """As `Client.ready`."""
        try:
            return calls.read_ready(await self._exchange(calls.ready()))
        except Unreachable:
            return False

    async def ask(self, call: Call[T]) -> T:
        """As `Client.ask`."""
        if call.plain is None:
            return call.read(await self.send(call))
        if self._binary:
            try:
                return call.read(await self.send(call))
            except (UnsupportedMediaType, NotAcceptable):
                self._binary = False
        return await self.ask(call.in_json())

    async def send(self, call: Call[Any]) -> httpx.Response:
        """As `Client.send`."""
        return calls.checked(await self._exchange(call))

    async def _exchange(self, call: Call[Any]) -> httpx.Response:
        attempts = self.retries.begin(call, self.timeout)
        while (pause := attempts.pause(outcome := await self._once(call))) is not None:
            await asyncio.sleep(pause)
        if isinstance(outcome, Exception):
            raise connection_failure(outcome, self.base_url) from outcome
        return outcome

    async def _once(self, call: Call[Any]) -> Outcome:
        try:
            return await self._http.request(call.method, call.path, content=call.body, headers=call.headers)
        except (httpx.RequestError, httpx.InvalidURL) as error:
            return error

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()
