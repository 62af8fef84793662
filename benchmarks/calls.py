"""Count the Python calls that a warm small request makes in attend, by file or by function. The count does not depend on the machine.

The request passes the whole server in this process, from the bytes that uvicorn receives to the bytes that it sends. A coroutine that is
resumed counts again.
"""

import argparse
import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

import attend
from attend.settings import Settings
from attend.web.app import create_app
from attend.web.connections import Connection

ROOT = str(Path(attend.__file__).parent) + "/"
BODY: dict[str, object] = {"query": [[0.25] * 64] * 16, "reply": {"decimals": 4}}
FIELDS: dict[str, dict[str, object]] = {
    "mask": {"attend_mask": [[1] * 16] * 16},
    "bias": {"bias": [[0.5] * 16] * 16},
    "causal": {"causal": True},
    "lengths": {"valid_lens": 13},
}
WARM = 5  # requests before the one that is counted


class Transport(asyncio.Transport):
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = bytearray()

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        pass


def request(path: str, body: str, *headers: str) -> bytes:
    """The bytes of a POST request."""
    lines = [
        f"POST {path} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        *headers,
        f"content-length: {len(body)}",
        "",
        body,
    ]
    return "\r\n".join(lines).encode()


async def counted(data: bytes, settings: Settings) -> Counter[tuple[str, str]]:
    """The calls of one request by (file, function)."""
    app = create_app(settings)
    config = uvicorn.Config(app, http=Connection, log_config=None, server_header=False)
    config.load()
    calls: Counter[tuple[str, str]] = Counter()

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            calls[code.co_filename.removeprefix(ROOT), code.co_qualname] += 1

    async with app.router.lifespan_context(app) as state:
        service = state["service"]
        while not service.started:
            await asyncio.sleep(0.01)
        transport = Transport()
        connection = Connection(config, uvicorn.server.ServerState(), state)
        connection.connection_made(transport)
        for i in range(WARM + 1):
            transport.written.clear()
            if i == WARM:
                sys.setprofile(profile)
            connection.data_received(data)
            while connection.cycle is None or not connection.cycle.response_complete:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            sys.setprofile(None)
            if not transport.written.startswith(b"HTTP/1.1 200"):
                raise AssertionError(bytes(transport.written[:500]).decode())
        connection.connection_lost(None)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", action="store_true", help="with the access log")
    parser.add_argument("--functions", action="store_true", help="print each function")
    parser.add_argument("--field", choices=FIELDS, help="with this field in the request")
    arguments = parser.parse_args()
    settings = Settings(access_log=arguments.log)
    calls = asyncio.run(counted(request("/attend", json.dumps(BODY | FIELDS.get(arguments.field, {}))), settings))
    lines: Counter[str] = Counter()
    for (file, function), count in calls.items():
        lines[f"{file} {function}" if arguments.functions else file] += count
    for name, count in sorted(lines.items()):
        print(f"{count:5} {name}")
    print(f"{calls.total():5} calls")


if __name__ == "__main__":
    main()
