"""The client of a command: of a running server, or of the application in this process."""

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import typer

from service.cli.flags import given_flags
from service.client import Client
from service.client.connection import API_KEY
from service.errors import AttendError
from service.serving.threads import plan_threads, usable_cores
from service.settings import BadSettings, Settings, read_settings

UNBOUNDED = 1 << 62
IN_PROCESS: dict[str, Any] = {  # settings of an application with one caller, who is the user of this process
    "host": "127.0.0.1",
    "uds": None,
    "keys_file": None,
    "grpc_port": None,
    "workers": 1,
    "telemetry": False,
    "access_log": False,
    "request_timeout": None,
    "max_queue_bytes": UNBOUNDED,
}


class InProcess(httpx.BaseTransport):
    """Passes requests to an application with these settings in this process. Its event loop runs only during a request."""

    def __init__(self, settings: Settings) -> None:
        """Raises BadSettings if the application cannot start."""
        try:
            threads = plan_threads(1, settings.threads, usable_cores())
        except ValueError as error:
            raise BadSettings(str(error)) from None
        os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch creates its thread pool
        import torch

        from service.cli.logs import configure_logs
        from service.web.app import create_app

        torch.set_num_threads(threads)
        configure_logs(settings.log_format, "warning")
        try:
            app = create_app(settings.model_copy(update=IN_PROCESS))
        except ValueError as error:  # no such device
            raise BadSettings(str(error)) from None
        self._asgi, self._service, self._loop = httpx.ASGITransport(app), app.state.service, asyncio.Runner()
        self._service.wire_limits = replace(self._service.wire_limits, body_bytes=UNBOUNDED, layer_bytes=UNBOUNDED)  # of request bodies
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

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self._loop.run(self._respond(request))

    async def _respond(self, request: httpx.Request) -> httpx.Response:
        response = await self._asgi.handle_async_request(request)
        body = b"".join([piece async for piece in response.aiter_raw()])
        return httpx.Response(response.status_code, headers=response.headers, content=body)

    def close(self) -> None:
        self._service.close()
        self._loop.close()


@contextmanager
def in_process(settings: Settings) -> Iterator[Client]:
    """A client of an application with these settings in this process. Raises BadSettings and AttendError."""
    with Client(timeout=None, retries=0, transport=InProcess(settings)) as client:
        try:
            yield client
        except AttendError as error:
            error.__notes__ = []  # status and request id, which are of no use here
            raise


@contextmanager
def open_client(url: str | None, ca: Path | None, config: Path | None, flags: Mapping[str, Any]) -> Iterator[Client]:
    """A client of the server at `url`, verified by the CA bundle `ca`; without a URL, of an application with these settings.

    The API key is that in ATTEND_API_KEY. Raises BadSettings, AttendError or typer.BadParameter.
    """
    if url is not None:
        if useless := given_flags({**flags, "config": config}):
            raise typer.BadParameter(f"{', '.join(useless)} cannot be combined with --url: a server has its own layers and settings")
        try:
            client = Client(url, api_key=os.environ.get(API_KEY), verify=ca or True)
        except OSError as error:
            raise typer.BadParameter(str(error), param_hint="--ca") from None
        with client:
            yield client
        return
    settings = read_settings(dict(flags), config)
    if "layers_dir" not in flags:  # a command saves no layers unless the flag is given
        settings = settings.model_copy(update={"layers_dir": None})
    with in_process(settings) as client:
        yield client
