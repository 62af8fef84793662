"""Signal handlers of a server process; `docs/operations.md` has the table for operators.

SIGTERM starts a drain: /health/ready returns 503, so that load balancers stop sending calls, but calls are still accepted. After the drain
the port closes, accepted calls are answered, and the process exits. SIGINT, or a second SIGTERM, skips the drain. SIGHUP acts as SIGTERM
on a server of one process; a supervisor replaces its workers one by one. A worker whose supervisor dies exits as after SIGTERM.
"""

import asyncio
import os
import signal
import threading
import time
from functools import partial
from multiprocessing import parent_process
from types import FrameType

import structlog

from service.serving.service import Service

log = structlog.get_logger("attend")


def handle_signals(service: Service, seconds: float, is_worker: bool) -> None:
    """Installs handlers that call uvicorn's handlers after the drain. Must be called on the event loop of the server.

    SIGHUP tells a worker that it is being replaced: it closes its connections as in a drain of `seconds`, but stays ready, since the load
    balancer must keep sending calls to the other workers. SIGHUP stays ignored if it was ignored before (nohup).
    """
    close, interrupt, loop = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), asyncio.get_running_loop()
    if not callable(close) or not callable(interrupt):
        return

    def stop(frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(partial(log.info, "stopping"))
        loop.call_soon_threadsafe(service.stop_admitting)
        close(signal.SIGTERM, frame)

    def drain(number: int, frame: FrameType | None) -> None:
        if service.draining or not seconds:
            stop(frame)
            return
        service.draining = True
        loop.call_soon_threadsafe(partial(log.info, "draining", seconds=seconds))
        loop.call_soon_threadsafe(loop.call_later, seconds, stop, frame)

    def hang_up(number: int, frame: FrameType | None) -> None:
        if service.draining or service.retiring:  # a terminal that closes may send SIGHUP twice
            return
        if not is_worker:
            drain(number, frame)
            return
        service.retiring = True
        loop.call_soon_threadsafe(partial(log.info, "retiring", seconds=seconds))
        loop.call_soon_threadsafe(loop.call_later, seconds, retire, frame)

    def retire(frame: FrameType | None) -> None:
        if not service.draining:
            stop(frame)

    def leave(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(service.stop_admitting)
        interrupt(number, frame)

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, leave)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hang_up)


def ignore_hangup() -> None:
    """Ignores SIGHUP from now on: the event loop that its handler uses is about to end."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def exit_with_supervisor(patience: float) -> None:
    """Makes this worker exit when its supervisor dies: as after SIGTERM, and by force after `patience` seconds."""
    supervisor = parent_process()
    if supervisor is None:  # this is the only process
        return

    def wait() -> None:
        supervisor.join()
        log.error("supervisor died", pid=os.getpid())
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(patience)
        os._exit(1)

    threading.Thread(target=wait, name="supervisor", daemon=True).start()
