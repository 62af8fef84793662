"""The path of a request: the table in docs/design.md has every file that a small JSON request calls, in this order, and no other; such a
request makes few calls."""

import asyncio
import gc
import re
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import orjson
import pytest
import uvicorn

import attend
from attend.attention.native.extension import extension
from attend.settings import Settings
from attend.web.app import create_app
from attend.web.connections import Connection
from attend.wire.native import numbers
from support.scheduler import loop_iterations, run

SOURCE = Path(attend.__file__).parent
DESIGN = Path(__file__).parents[1] / "docs" / "design.md"


def table_of_path() -> list[str]:
    """The files in the first table of the section about the path."""
    section = DESIGN.read_text().partition("## The path of a request")[2].partition("Other requests pass")[0]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    return [file for row in rows for file in re.findall(r"`([^`]+)`", row)]


async def called_by_a_warm_request(**fields: Any) -> list[str]:
    """The file of each function of this project that is called while the fourth equal request is answered by a real server."""
    body = orjson.dumps({"query": [[0.5] * 64] * 3, **fields})
    head = b"POST /attend HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    app = create_app(Settings(access_log=False))
    server = uvicorn.Server(uvicorn.Config(app, http=Connection, log_config=None))
    listening = socket.create_server(("127.0.0.1", 0))
    served = asyncio.create_task(server.serve([listening]))
    while not app.state.service.started:
        await asyncio.sleep(0.001)
    called: list[str] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            called.append(path.relative_to(SOURCE).as_posix())

    reader, writer = await asyncio.open_connection(*listening.getsockname())
    gc.collect()
    gc.disable()  # what earlier tests left suspended in reference cycles would end, and so be called, in the middle of this request
    try:
        for warm in (False, False, False, True):
            sys.setprofile(profile if warm else None)
            writer.write(head + body)
            reply = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", reply)
            assert reply.startswith(b"HTTP/1.1 200") and length is not None
            await reader.readexactly(int(length[1]))
            await loop_iterations()
    finally:
        sys.setprofile(None)
        gc.enable()
        writer.close()
        server.should_exit = True
        await served
    return called


def test_the_path_in_the_documentation_is_the_path_of_a_warm_small_request() -> None:
    """Without compiled code, numbers are read and calls computed elsewhere, so only the other packages are compared."""

    async def test() -> None:
        is_compiled = extension is not None and numbers.variant() != "python"
        packages = ("web/", "serving/", "wire/", "attention/") if is_compiled else ("web/", "serving/")
        called = [file for file in dict.fromkeys(await called_by_a_warm_request()) if file.startswith(packages)]
        assert called == [file for file in table_of_path() if file.startswith(packages)]

    run(test())


@pytest.mark.parametrize(("fields", "most"), [({}, 76), ({"attend_mask": [[1, 0, 1]] * 3, "reply": {"decimals": 4}}, 92)])
def test_a_warm_small_request_makes_few_calls(fields: dict[str, Any], most: int) -> None:
    """Each is a step that a reader has to follow."""

    async def test() -> None:
        assert len(await called_by_a_warm_request(**fields)) <= most

    run(test())


def test_the_path_has_each_file_once() -> None:
    table = table_of_path()
    assert len(table) == len(set(table)) > 20
    assert all((SOURCE / file).is_file() for file in table)
