"""Runs the command `attend`: in this process, which saves the imports, or in a process of its own as a user runs it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import structlog
import torch
from typer.testing import CliRunner

from attend.cli import app, main

Done = subprocess.CompletedProcess[bytes]


def run_attend(*arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None, cwd: Path | None = None) -> Done:
    """Runs a command that starts no server, in this process. An exception that it does not report is raised here."""
    variables = {**dict.fromkeys(os.environ), **env} if env else None
    with chdir(cwd) if cwd else nullcontext(), _restored(cwd), CliRunner().isolation(stdin, variables) as (stdout, stderr, _):
        code: object = 0
        try:
            with mock.patch("sys.argv", ["attend", *arguments]):
                app(prog_name="attend") if app.registered_commands else main()  # main adds the commands, which is done once
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
        sys.stderr.flush()
        return subprocess.CompletedProcess(arguments, int(str(code or 0)), stdout.getvalue(), stderr.getvalue())


@contextmanager
def _restored(cwd: Path | None) -> Iterator[None]:
    """Afterwards this process is as it was: threads, logging, variables, paths, and what the command imported from its folder."""
    threads, logging = torch.get_num_threads(), structlog.get_config()
    quiet = mock.patch(
        "attend.cli.logs.configure_logs",
        lambda log_format, level: structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level)),
    )
    with mock.patch.dict(os.environ), mock.patch("sys.path", list(sys.path)), quiet:
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            structlog.configure(**logging)
            for name, module in list(sys.modules.items()):
                if cwd is not None and str(getattr(module, "__file__", None)).startswith(str(cwd)):
                    del sys.modules[name]


def spawn_attend(*arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> Done:
    """Runs a command in a process of its own. Standard error never holds a traceback or a warning."""
    command = [sys.executable, "-W", "error::ResourceWarning", "-m", "attend", *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, env=env, timeout=300)
    assert b"Traceback" not in done.stderr and b"Warning" not in done.stderr, done.stderr.decode()
    return done
