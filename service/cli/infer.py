"""`attend infer`: the reply to one request in a file, from a server or computed in this process."""

from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from service.cli.flags import ENGINE_FIELDS, AsJson, Ca, Config, Url, with_settings
from service.cli.request_file import File, print_reply, send_file
from service.cli.terminal import report_errors
from service.client import AttendResult, TopWeights
from service.client.responses import read_attend
from service.client.sessions import session_path
from service.tensors import Array

EPILOG = """Examples: attend infer request.json --d-model 4 --num-heads 2

echo '{"query": [[1, 0, 0, 0], [0, 1, 0, 0]]}' | attend infer - --d-model 4 --num-heads 2 --json

attend infer request.json --url http://127.0.0.1:8000

attend infer step.json --session ID --url http://127.0.0.1:8000"""
SessionId = Annotated[str | None, typer.Option("--session", help="Id of a session of the server, as `attend sessions start` prints it.")]
MAX_NUMBERS = 512  # of a tensor that is printed in full


@with_settings(*ENGINE_FIELDS)
def infer(
    file: File,
    session: SessionId = None,
    url: Url = None,
    ca: Ca = None,
    as_json: AsJson = False,
    config: Config = None,
    **flags: Any,
) -> None:
    """Compute one request and show the shapes and numbers of the reply.

    Without --url the layers are those that `attend serve` would have with the same flags, environment and file, and that in
    NAME.safetensors beside FILE, if the request is for the layer NAME.

    With --session the request is a step: its rows are appended to the session, and attend to all rows of it.
    """
    if session is not None and url is None:
        raise typer.BadParameter("expected --url with --session, since a server keeps the session")
    path = "/attend" if session is None else f"{session_path(session)}/attend"
    with report_errors("infer"):
        response = send_file("infer", path, file, lambda document: document, url, ca, config, flags)
        result = None if as_json else read_attend(response)
    if result is None:
        print_reply(response)
        return
    console = Console(highlight=False, markup=False)
    console.print(headline(result), soft_wrap=True)
    for name, tensor in result.items():
        parts = tensor._asdict().items() if isinstance(tensor, TopWeights) else [("", tensor)]
        for part, array in parts:
            console.print(f"\n{name}{'.' if part else ''}{part} {list(array.shape)}")
            console.print(numbers(array, console.width), soft_wrap=True)


def headline(result: AttendResult) -> str:
    """One line with the layer, its fingerprint and the time of each phase."""
    line = f"layer {result.layer.name}, fingerprint {result.layer.fingerprint[:12]}"
    if result.session_length is not None:
        line += f", session of {result.session_length} rows"
    if result.fully_masked_rows:
        line += f", {result.fully_masked_rows} fully masked rows"
    return line + "; ms: " + ", ".join(f"{phase} {duration:g}" for phase, duration in result.timing.items())


def numbers(array: Array, width: int) -> str:
    """The numbers of an array in brackets; only the corners of a large one."""
    array = array if array.dtype.kind in "iu" else array.astype(np.float64)
    return np.array2string(array, max_line_width=width, precision=4, suppress_small=True, threshold=MAX_NUMBERS)
