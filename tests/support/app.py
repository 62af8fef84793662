"""The application on a real socket, in this process."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import uvicorn

from service.settings import Settings
from service.web.app import create_app
from service.web.connections import Connection


@contextmanager
def serve_here(settings: Settings) -> Iterator[str]:
    """The URL of a server in a thread of this process, once it is ready. It starts in a tenth of the time of `start_server`."""
    app = create_app(settings)
    config = uvicorn.Config(app, http=Connection, log_config=None, server_header=False, timeout_graceful_shutdown=20)
    server, listening = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    url, deadline = f"http://127.0.0.1:{listening.getsockname()[1]}", time.monotonic() + 60
    try:
        while httpx.get(f"{url}/health/ready").status_code != 200:
            assert time.monotonic() < deadline, "not ready"
            time.sleep(0.01)
        yield url
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
