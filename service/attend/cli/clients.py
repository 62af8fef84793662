"""The service that a command uses: a running server, the application in this process, or a server in a child process."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import typer

from attend.client import Client
from attend.client.connection import API_KEY
from attend.errors import AttendError
from attend.serving.threads import plan_threads, prepare_torch, usable_cores
from attend.settings import PREFIX, BadSettings, Settings, read_settings

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
START_SECONDS = 120
STOP_SECONDS = 10
POLL = 0.05  # seconds
COMMAND = ["-m", "attend", "serve", "--host", "127.0.0.1", "--port", "0", "--log-format", "json", "--no-access-log"]


@contextmanager
def open_client(url: str | None, ca: Path | None, config: Path | None = None, flags: Mapping[str, Any] | None = None) -> Iterator[Client]:
    """A client of the server at `url`, verified by the CA bundle `ca`; without a URL, of an application with these settings.

    The API key is that in ATTEND_API_KEY. Raises BadSettings, AttendError or typer.BadParameter.
    """
    flags = flags or {}
    if url is not None:
        given = [name for name, value in {**flags, "config": config}.items() if value is not None]
        if useless := [f"--{name.replace('_', '-')}" for name in given]:
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


@contextmanager
def in_process(settings: Settings) -> Iterator[Client]:
    """A client of an application with these settings in this process. Raises BadSettings and AttendError."""
    with Client(timeout=None, retries=0, transport=InProcessTransport(settings)) as client:
        try:
            yield client
        except AttendError as error:
            error.__notes__ = []  # status and request id, which are of no use here
            raise


class InProcessTransport(httpx.BaseTransport):
    """Passes requests to an application with these settings in this process. Its event loop runs only during a request."""

    def __init__(self, settings: Settings) -> None:
        """Raises BadSettings if the application cannot start."""
        try:
            threads = plan_threads(1, settings.threads, usable_cores())
        except ValueError as error:
            raise BadSettings(str(error)) from None
        prepare_torch(threads)
        import torch

        from attend.cli.logs import configure_logs
        from attend.web.app import create_app

        torch.set_num_threads(threads)
        configure_logs(settings.log_format, "warning")
        try:
            app = create_app(settings.model_copy(update=IN_PROCESS))
        except ValueError as error:  # no such device
            raise BadSettings(str(error)) from None
        self._asgi, self._service, self._loop = httpx.ASGITransport(app), app.state.service, asyncio.Runner()
        self._service.wire_limits = replace(
            self._service.wire_limits, max_body_bytes=UNBOUNDED, max_layer_bytes=UNBOUNDED
        )  # of request bodies
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


class NotStarted(Exception):
    """The server did not become ready; the message has the end of its log."""


@contextmanager
def child_server() -> Iterator[str]:
    """Yields the URL of a ready server with default settings; stops the server at the end of the block. Raises NotStarted."""
    root = str(Path(__file__).parents[2])  # not another package `attend` in the current folder (-P)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    with TemporaryDirectory(prefix="attend-") as folder:
        log = Path(folder) / "log"
        with log.open("ab") as stderr:
            process = subprocess.Popen([sys.executable, "-P", *COMMAND], stdin=subprocess.DEVNULL, stderr=stderr, env=environment)
        try:
            yield _wait_for_url(process, log)
        finally:
            process.send_signal(signal.SIGINT)  # stops without draining: there are no other clients
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_url(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """The URL of the server once its log says that it is ready. Raises NotStarted."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        ended = process.poll() is not None or time.monotonic() > deadline
        lines = log.read_text(errors="replace").splitlines(keepends=True)
        events = {event.get("event"): event for event in map(_event, lines)}
        if "ready" in events:
            return str(events["listening"]["url"])
        if ended or "not ready" in events:
            raise NotStarted("the server did not become ready; its log ends:\n" + "".join(lines[-8:]))
        time.sleep(POLL)


def _event(line: str) -> dict[str, str]:
    """The event of a structured line; {} for any other line."""
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}
