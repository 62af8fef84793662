"""A model of transformers and its tokenizer, from a folder; and its pass on a text, whose failures are messages. For `attend capture` and
`attend heads`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from attend.checkpoints.detection import listed
from attend.cli.terminal import fail

MISSING = "pip install transformers"


def load_model(command: str, folder: Path, ends: tuple[str, ...] = ()) -> tuple[Any, Any]:
    """The model in a folder, in float32, and its tokenizer. Without `ends`, the model has no head for a task; else its class is the one in
    its config that ends with one of these. Raises typer.Exit if they cannot be loaded.
    """
    try:
        import transformers as hf
    except ImportError:
        fail(command, "the package transformers is not installed", MISSING, code=2)
    if not (folder / "config.json").is_file():
        fail(
            command,
            f"{folder} is not the folder of a model: it has no config.json",
            "Give a folder that save_pretrained has written.",
            code=2,
        )
    untyped: Any = hf.utils.logging
    untyped.set_verbosity_error()  # what matters of its report is printed below
    untyped.disable_progress_bar()
    local: dict[str, Any] = {"local_files_only": True}
    try:
        kind: Any = hf.AutoModel
        if ends:
            names = hf.AutoConfig.from_pretrained(folder, **local).architectures or ["none"]
            own = [name for name in names if name.endswith(ends) and hasattr(hf, name)]
            if not own:
                expected = f"expected a model that predicts tokens ({', '.join(f'…{end}' for end in ends)})"
                fail(command, f"{expected}, got {', '.join(names)} in {folder}", code=2)
            kind = getattr(hf, own[0])
        tokenizer = hf.AutoTokenizer.from_pretrained(folder, **local)
        model, report = kind.from_pretrained(folder, output_loading_info=True, **local)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        fail(command, f"cannot read the model in {folder}: {str(error).strip().splitlines()[0]}", code=2)
    if missing := sorted(report["missing_keys"]):
        typer.echo(f"attend {command}: not in the files of {folder}, so drawn at random: {listed(missing)}", err=True)
    return model.float().eval(), tokenizer


@contextmanager
def report_model_errors(command: str) -> Iterator[None]:
    """Turns what a model or a tokenizer raises for a text, for example if it is too long, into a message."""
    try:
        yield
    except typer.Exit:  # a RuntimeError
        raise
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError) as error:
        fail(command, f"the model cannot be run on this text: {str(error).strip().splitlines()[0]}")
