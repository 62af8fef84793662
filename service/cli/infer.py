"""`attend infer`: the reply to one request in a file, from a server or computed in this process."""

from typing import Any

import numpy as np
from rich.console import Console

from service.cli.flags import ENGINE_FIELDS, AsJson, Ca, Config, Url, with_settings
from service.cli.request_file import File, print_reply, send_file
from service.cli.terminal import report_errors
from service.client import AttendResult, TopWeights
from service.client.responses import read_attend
from service.tensors import Array

EPILOG = """Examples: attend infer request.json --d-model 4 --num-heads 2

echo '{"query": [[1, 0, 0, 0], [0, 1, 0, 0]]}' | attend infer - --d-model 4 --num-heads 2 --json

attend infer request.json --url http://127.0.0.1:8000"""
MAX_NUMBERS = 512  # of a tensor that is printed in full


@with_settings(*ENGINE_FIELDS)
def infer(file: File, url: Url = None, ca: Ca = None, as_json: AsJson = False, config: Config = None, **flags: Any) -> None:
    """Compute one request and show the shapes and numbers of the reply.

    Without --url the layers are those that `attend serve` would have with the same flags, environment and file, and that in
    NAME.safetensors beside FILE, if the request is for the layer NAME.
    """
    with report_errors("infer"):
        response = send_file("infer", "/attend", file, lambda document: document, url, ca, config, flags)
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
    if result.fully_masked_rows:
        line += f", {result.fully_masked_rows} fully masked rows"
    return line + "; ms: " + ", ".join(f"{phase} {duration:g}" for phase, duration in result.timing.items())


def numbers(array: Array, width: int) -> str:
    """The numbers of an array in brackets; only the corners of a large one."""
    array = array if array.dtype.kind in "iu" else array.astype(np.float64)
    return np.array2string(array, max_line_width=width, precision=4, suppress_small=True, threshold=MAX_NUMBERS)
