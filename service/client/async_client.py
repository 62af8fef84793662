"""AsyncClient: the methods of `Client` with `await`.

Arrays are encoded and decoded on the event loop: copying megabytes takes less time than a switch of threads.
"""

import asyncio
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


class AsyncClient:
    """One server, over connections that stay open; belongs to one event loop. Raises and retries as `Client` does."""

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
        """The arguments of `Client`."""
        self.base_url, self.timeout, self.retries = base_url, timeout, Retries.of(retries)
        self._binary = True
        connection = Connection(base_url, timeout, api_key, dict(headers or {}), verify)
        try:
            self._http = httpx.AsyncClient(**connection.options(), transport=transport)
        except httpx.InvalidURL as error:
            raise connection_error(error, base_url) from None

    async def attend(
        self,
        query: ArrayLike,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        *,
        layer: str = "default",
        timeout: Timeout = USE_CLIENT_DEFAULT,
        **fields: Any,
    ) -> AttendResult:
        """As `Client.attend`."""
        return await self.perform(operations.attend({"layer": layer, "query": query, "key": key, "value": value, **fields}), timeout)

    async def analysis(
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
        """As `Client.analysis`."""
        operation = operations.analysis({"layer": layer, "query": query, "key": key, "value": value, "metrics": metrics, **fields})
        return await self.perform(operation, timeout)

    async def plan(
        self,
        query: ArrayLike | Mapping[str, Any],
        key: ArrayLike | Mapping[str, Any] | None = None,
        value: ArrayLike | Mapping[str, Any] | None = None,
        *,
        layer: str = "default",
        timeout: Timeout = USE_CLIENT_DEFAULT,
        **fields: Any,
    ) -> Plan:
        """As `Client.plan`."""
        return await self.perform(operations.plan({"layer": layer, "query": query, "key": key, "value": value, **fields}), timeout)

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
        timeout: Timeout = USE_CLIENT_DEFAULT,
        **fields: Any,
    ) -> bytes:
        """As `Client.figure`."""
        raw = {"kind": kind, "format": format, **(figure or {})}
        return await self.perform(operations.figure({"layer": layer, "query": query, "key": key, "value": value, **fields}, raw), timeout)

    async def layers(self, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> list[LayerDocument]:
        """As `Client.layers`."""
        return await self.perform(operations.layers(), timeout)

    async def layer(self, name: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> LayerDocument:
        """As `Client.layer`."""
        return await self.perform(operations.layer(name), timeout)

    async def put_layer(
        self,
        name: str,
        spec: LayerSpec | Mapping[str, Any],
        weights: Mapping[str, ArrayLike] | None = None,
        *,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> LayerDocument:
        """As `Client.put_layer`."""
        return await self.perform(operations.put_layer(name, spec, weights), timeout)

    async def put_layer_file(
        self,
        name: str,
        file: bytes | str | Path,
        *,
        layout: str | None = None,
        prefix: str | None = None,
        spec: Mapping[str, Any] | None = None,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> LayerDocument:
        """As `Client.put_layer_file`."""
        body = file if isinstance(file, bytes) else await asyncio.to_thread(Path(file).read_bytes)
        return await self.perform(operations.put_layer_file(name, body, layout, prefix, spec), timeout)

    async def put_layer_from(
        self,
        name: str,
        path: str | Path,
        layer: int,
        *,
        part: str | None = None,
        spec: Mapping[str, Any] | None = None,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> LayerDocument:
        """As `Client.put_layer_from`."""
        body = await asyncio.to_thread(operations.model_layer, path, layer, part)
        return await self.perform(operations.put_layer_file(name, body, None, None, spec), timeout)

    async def layer_file(self, name: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> bytes:
        """As `Client.layer_file`."""
        return await self.perform(operations.layer_file(name), timeout)

    async def layer_weights(self, name: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> dict[str, Array]:
        """As `Client.layer_weights`."""
        return read_tensors(await self.layer_file(name, timeout=timeout))[0]

    async def delete_layer(self, name: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> None:
        """As `Client.delete_layer`."""
        await self.perform(operations.delete_layer(name), timeout)

    async def ready(self, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> bool:
        """As `Client.ready`."""
        try:
            return read_ready(await self._exchange(operations.ready(), timeout))
        except Unreachable:
            return False

    async def perform(self, operation: Operation[T], timeout: Timeout = USE_CLIENT_DEFAULT) -> T:
        """As `Client.perform`."""
        if operation.fallback is None:
            return operation.read(await self.send(operation, timeout))
        if self._binary:
            try:
                return operation.read(await self.send(operation, timeout))
            except (UnsupportedMediaType, NotAcceptable):
                self._binary = False
        return await self.perform(operation.as_json(), timeout)

    async def send(self, operation: Operation[Any], timeout: Timeout = USE_CLIENT_DEFAULT) -> httpx.Response:
        """As `Client.send`."""
        return raise_for_status(await self._exchange(operation, timeout))

    async def _exchange(self, operation: Operation[Any], timeout: Timeout) -> httpx.Response:
        seconds = self.timeout if timeout is USE_CLIENT_DEFAULT else timeout
        attempts = Attempts(self.retries, operation, seconds)
        while (delay := attempts.next_delay(outcome := await self._once(operation, seconds))) is not None:
            await asyncio.sleep(delay)
        if isinstance(outcome, Exception):
            raise connection_error(outcome, self.base_url) from outcome
        return outcome

    async def _once(self, operation: Operation[Any], seconds: float | None) -> Outcome:
        try:
            return await self._http.request(
                operation.method, operation.path, content=operation.body, headers=operation.headers, timeout=seconds
            )
        except (httpx.RequestError, httpx.InvalidURL) as error:
            return error

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()
