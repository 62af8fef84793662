"""POST /words/tokens: the tokens of a text, by a tokenizer that the caller sends as the text of a tokenizer.json.

Needs the package tokenizers, which another process uses (`tokenizing.py`): no thread waits for it, and it can be killed.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from attend.errors import DeadlinePassed, InvalidRequest
from attend.serving.fair_share import FairShare
from attend.serving.layer_requests import read_object
from attend.serving.requests import TOO_LATE, Request
from attend.serving.service import Service
from attend.wire.problems import describe_value, validate
from attend.wire.schemas.words import TokenizedText, TokensRequest

MAX_BODY_BYTES = 64 << 20  # the largest vocabularies have 260,000 tokens and take half of it
MAX_SECONDS = 20.0  # the largest vocabularies take a few
MAX_OUTPUT_BYTES = 8 << 20  # several times what the tokens of the longest text take
MAX_PROCESSES = 4  # each gives way to the server
PIECE_BYTES = 1 << 16  # read or written at once
GONE_SECONDS = 0.1  # between two looks whether the caller has left
COMMAND = [sys.executable, "-I", str(Path(__file__).with_name("tokenizing.py"))]
ENVIRONMENT = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}


class Tokenizers:
    """Tokenizes by the tokenizers of callers, each in a process that ends with its request. All methods run on the event loop."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.processes = FairShare[str](MAX_PROCESSES, times=1, least=1)  # number of processes of each caller

    async def read(self, request: Request) -> str:
        """POST /words/tokens: the reply as JSON. Raises InvalidRequest, also if the package is not installed, Overloaded, CallerGone or
        DeadlinePassed."""
        engine, size = self.service.engine, request.size  # decoding takes the body out of `request`
        document = await read_object(self.service, request, MAX_BODY_BYTES)  # other bodies have at most 4 MiB besides numbers
        message = await engine.run(request, size, _message, document)
        del document
        with self.processes.slot(request.caller, "tokenizers", round(MAX_SECONDS)):
            status, output = await self._run(message, request)
        if request.lease is not None:
            request.lease.add(len(output))
        return await engine.run(request, len(output), _reply_text, status, output)

    async def _run(self, message: bytes, request: Request) -> tuple[int, bytes]:
        """The exit status of a process and what it has written. It is killed if the caller leaves or its deadline passes."""
        seconds, clock = MAX_SECONDS, self.service.clock
        if request.deadline is not None:
            seconds = min(seconds, request.deadline - clock())
        process = await asyncio.create_subprocess_exec(*COMMAND, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=ENVIRONMENT)
        running, leaving = asyncio.ensure_future(_output_of(process, message)), asyncio.ensure_future(_until(request.gone))
        try:
            await asyncio.wait((running, leaving), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return running.result()
            request.check_caller(clock())
            if request.deadline is not None and seconds < MAX_SECONDS:
                raise DeadlinePassed(TOO_LATE)
            expected = f"a tokenizer that takes at most {MAX_SECONDS:g} seconds for the text"
            raise InvalidRequest.where("/tokenizer", expected, "one that takes longer")
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
            running.cancel()
            leaving.cancel()
            await asyncio.gather(running, leaving, return_exceptions=True)
            await _drain(process)


async def _drain(process: Process) -> None:
    """Wait until a process that has been killed has ended; asyncio sees that once what it had written is read."""
    assert process.stdout is not None
    while await process.stdout.read(PIECE_BYTES):
        pass
    await process.wait()


async def _output_of(process: Process, message: bytes) -> tuple[int, bytes]:
    """The exit status of a process that reads `message`, and what it has written. Raises InvalidRequest for more than MAX_OUTPUT_BYTES."""
    assert process.stdin is not None and process.stdout is not None
    writing, output = asyncio.ensure_future(_write(process.stdin, memoryview(message))), bytearray()
    try:
        while piece := await process.stdout.read(PIECE_BYTES):
            output += piece
            if len(output) > MAX_OUTPUT_BYTES:
                raise InvalidRequest.where(
                    "/tokenizer", f"a tokenizer whose tokens take at most {MAX_OUTPUT_BYTES} bytes", "one whose take more"
                )
        return await process.wait(), bytes(output)
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


async def _write(pipe: asyncio.StreamWriter, message: memoryview) -> None:
    """Write a message in pieces, of which few are in memory twice, and close the pipe."""
    with suppress(ConnectionError):  # the process has ended
        for start in range(0, len(message), PIECE_BYTES):
            pipe.write(message[start : start + PIECE_BYTES])
            await pipe.drain()
        pipe.close()


async def _until(gone: Callable[[], bool]) -> None:
    while not gone():
        await asyncio.sleep(GONE_SECONDS)


def _message(document: dict[str, Any]) -> bytes:
    request = validate(TokensRequest, document)
    return json.dumps({"tokenizer": request.tokenizer, "text": request.text}).encode()


def _reply_text(status: int, output: bytes) -> str:
    found = {"error": f"status {status}"} if status else json.loads(output)  # it was ended by a signal, or had no memory
    if "error" in found:
        raise InvalidRequest.where("/tokenizer", "the text of a tokenizer.json", describe_value(found["error"]))
    if not found:
        raise InvalidRequest.where("/tokenizer", "a server with the package tokenizers: pip install tokenizers", "one without it")
    return TokenizedText(**found).model_dump_json()
