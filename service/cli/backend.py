"""The backends of commands: a running server, or a service in this process."""

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer

from service.cli.flags import given
from service.client import Client, operations
from service.client.connection import API_KEY
from service.serving.threads import plan_threads, usable_cores
from service.settings import BadSettings, Settings, read_settings
from service.spec import LayerSpec
from service.tensors import Array
from service.wire.codec import CODECS
from service.wire.negotiation import SAFETENSORS
from service.wire.schemas.attend import LayerDocument

if TYPE_CHECKING:
    from service.serving.requests import EncodedReply  # which loads torch


@dataclass(frozen=True, slots=True)
class Response:
    """The body of a reply and the headers that the client reads (names in lower case)."""

    body: bytes
    headers: Mapping[str, str]


class Backend(Protocol):
    """The operations that commands need. Each raises exceptions of `service.errors`."""

    def attend(self, body: bytes) -> Response: ...
    def analyse(self, body: bytes) -> Response: ...
    def figure(self, body: bytes) -> bytes: ...
    def layers(self) -> list[LayerDocument]: ...
    def put_layer(self, name: str, spec: LayerSpec, weights: Mapping[str, Array] | None = None) -> LayerDocument: ...
    def put_layer_file(
        self, name: str, file: bytes, *, layout: str | None, prefix: str | None, spec: Mapping[str, Any] | None
    ) -> LayerDocument: ...
    def layer_file(self, name: str) -> bytes: ...
    def delete_layer(self, name: str) -> None: ...


class ServerBackend:
    """A running server."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.layers, self.put_layer, self.delete_layer = client.layers, client.put_layer, client.delete_layer
        self.put_layer_file, self.layer_file = client.put_layer_file, client.layer_file

    def attend(self, body: bytes) -> Response:
        return self._post("/attend", body)

    def analyse(self, body: bytes) -> Response:
        return self._post("/attend/analysis", body)

    def _post(self, path: str, body: bytes) -> Response:
        response = self._client.send(operations.Operation("POST", path, body))
        return Response(response.content, response.headers)

    def figure(self, body: bytes) -> bytes:
        return self._client.send(operations.Operation("POST", "/attend/figure", body)).content


class ServiceBackend:
    """A service with these settings in this process. Its event loop runs only during a call."""

    def __init__(self, settings: Settings) -> None:
        try:
            threads = plan_threads(1, settings.threads, usable_cores())
        except ValueError as error:
            raise BadSettings(str(error)) from None
        os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch creates its thread pool
        import torch

        from service.cli.logs import configure_logs
        from service.serving.requests import RawRequest
        from service.web.app import create_service

        torch.set_num_threads(threads)
        configure_logs(settings.log_format, "warning")
        try:
            self._request, self._service = RawRequest, create_service(settings)
        except ValueError as error:  # no such device
            raise BadSettings(str(error)) from None
        self._loop = asyncio.Runner()
        try:
            self._loop.run(self._service.start(settings.all_layers()))
            self._service.loader.stop_following()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and settings.layers_dir is not None:
                raise BadSettings(f"cannot use the folder of layers {settings.layers_dir}: {error.strerror}") from None
            if settings.device != "cpu" and isinstance(error, RuntimeError | AssertionError):  # from torch
                raise BadSettings(f"cannot compute on {settings.device}: {str(error).splitlines()[0]}") from None
            raise

    def attend(self, body: bytes) -> Response:
        return self._response(self._loop.run(self._service.engine.attend(self._request(body))))

    def analyse(self, body: bytes) -> Response:
        return self._response(self._loop.run(self._service.engine.analyse(self._request(body))))

    def _response(self, reply: "EncodedReply") -> Response:
        return Response(b"".join(reply.pieces), {"server-timing": reply.phases.server_timing()})

    def figure(self, body: bytes) -> bytes:
        return b"".join(self._loop.run(self._service.engine.figure(self._request(body))).pieces)

    def layers(self) -> list[LayerDocument]:
        return [layer.document() for layer in self._service.registry.all()]

    def put_layer(self, name: str, spec: LayerSpec, weights: Mapping[str, Array] | None = None) -> LayerDocument:
        layer, _ = self._loop.run(self._service.put_layer(name, self._request(operations.put_layer(name, spec, weights).body or b"")))
        return layer.document()

    def put_layer_file(
        self, name: str, file: bytes, *, layout: str | None, prefix: str | None, spec: Mapping[str, Any] | None
    ) -> LayerDocument:
        from service.serving.layers.files import Source
        from service.web.routes.layers import require_name

        require_name(name)
        source = Source(layout, prefix, None if spec is None else json.dumps(dict(spec)))
        layer, _ = self._loop.run(self._service.put_layer(name, self._request(file, CODECS[SAFETENSORS]), source))
        return layer.document()

    def layer_file(self, name: str) -> bytes:
        return b"".join(self._loop.run(self._service.export_layer(name)))

    def delete_layer(self, name: str) -> None:
        self._loop.run(self._service.loader.remove(name))

    def close(self) -> None:
        self._service.close()
        self._loop.close()


def server_client(url: str, ca: Path | None = None, **options: Any) -> Client:
    """A client of that server, with the key in ATTEND_API_KEY. Raises typer.BadParameter if `ca` cannot be read."""
    try:
        return Client(url, api_key=os.environ.get(API_KEY), verify=ca or True, **options)
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="--ca") from None


@contextmanager
def open_backend(url: str | None, ca: Path | None, config: Path | None, flags: Mapping[str, Any]) -> Iterator[Backend]:
    """The server at `url`, verified by the CA bundle `ca`, or without a URL a service with these settings.

    Raises BadSettings, AttendError or typer.BadParameter.
    """
    if url is not None:
        if useless := given({**flags, "config": config}):
            raise typer.BadParameter(f"{', '.join(useless)} cannot be combined with --url: a server has its own layers and settings")
        with server_client(url, ca) as client:
            yield ServerBackend(client)
        return
    settings = read_settings(dict(flags), config)
    if "layers_dir" not in flags:  # a command saves no layers unless the flag is given
        settings = settings.model_copy(update={"layers_dir": None})
    backend = ServiceBackend(settings)
    try:
        yield backend
    finally:
        backend.close()
