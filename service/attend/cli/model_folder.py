"""A model of transformers and its tokenizer, from a folder or from the cache of Hugging Face; and its arguments for a text. Failures are
messages. For `attend capture` and `attend heads`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from attend.checkpoints.detection import listed
from attend.cli.terminal import fail
from attend.client.model_inputs import model_arguments

Target = Annotated[
    str | None,
    typer.Option(
        help="What an encoder-decoder answers: its decoder reads the start token and then this, without its last token.", show_default=False
    ),
]
MISSING = "pip install transformers"
IN_PYTHON = {"heads": "interventions", "capture": "capture"}  # command -> function
SAVED = "Give a folder that save_pretrained has written."


def model_name(model: Path) -> str:
    """What a model is called after: the last part of its folder or of its name."""
    return model.resolve().name


def load_model(command: str, model: Path, ends: tuple[str, ...] = ()) -> tuple[Any, Any]:
    """A model, in float32, and its tokenizer. `model`: its folder, or the name of one that Hugging Face's cache has.

    Without `ends`, the model has no head for a task; else its class is the one in its config that ends with one of these. Raises typer.Exit
    if they cannot be loaded.
    """
    try:
        import transformers as hf
    except ImportError:
        fail(command, "the package transformers is not installed", MISSING, code=2)
    folder = _folder(command, model)
    untyped: Any = hf.utils.logging
    untyped.set_verbosity_error()  # what matters of its report is printed below
    untyped.disable_progress_bar()
    local: dict[str, Any] = {"local_files_only": True}
    kind: Any = hf.AutoModel
    with _report_reading(command, folder):
        names = hf.AutoConfig.from_pretrained(folder, **local).architectures or ["none"]
    if ends:
        own = [name for name in names if name.endswith(ends) and hasattr(hf, name)]
        if not own:
            fail(
                command, f"expected a model that predicts tokens (a class …{', …'.join(ends)}), got {', '.join(names)} in {folder}", code=2
            )
        kind = getattr(hf, own[0])
    with _report_reading(command, folder):
        loaded, report = kind.from_pretrained(folder, output_loading_info=True, **local)
    if loaded.main_input_name != "input_ids":
        message = f"expected a model that reads a text, got {type(loaded).__name__}, which reads {loaded.main_input_name}"
        fail(command, message, f"`attend.{IN_PYTHON[command]}` in Python takes its arguments.", code=2)
    with _report_reading(command, folder):
        tokenizer = hf.AutoTokenizer.from_pretrained(folder, **local)
    if missing := sorted(report["missing_keys"]):
        typer.echo(f"attend {command}: not in the files of {folder}, so drawn at random: {listed(missing)}", err=True)
    return loaded.float().eval(), tokenizer


@contextmanager
def _report_reading(command: str, folder: Path) -> Iterator[None]:
    """Turns what transformers raises for the files of a folder into a message."""
    try:
        yield
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        fail(command, f"cannot read the model in {folder}: {str(error).strip().splitlines()[0]}", code=2)


def written(file: Path, url: str | None) -> str:
    """What is said of a written capture."""
    page = f"at {url}" if url else "that `attend serve` starts"
    return f"Wrote {file}: drop it on the page of the server {page}."


def _folder(command: str, model: Path) -> Path:
    """The folder itself, or that of the model with this name in Hugging Face's cache. Raises typer.Exit if there is neither."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if (model / "config.json").is_file():
        return model
    name = model.as_posix()
    if model.exists():
        fail(command, f"{model} is not the folder of a model: it has no config.json", SAVED, code=2)
    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # a path
        fail(command, f"{model} is not the folder of a model: there is no such folder", SAVED, code=2)
    if not isinstance(config, str):
        fail(
            command,
            f"{name} is neither a folder nor a model in the cache of Hugging Face ({constants.HF_HUB_CACHE})",
            f"Models are not downloaded here: `hf download {name}` does it, or give a folder that save_pretrained has written.",
            code=2,
        )
    return Path(config).parent


def arguments_of(command: str, model: Any, tokenizer: Any, text: str, target: str | None) -> dict[str, Any]:
    """The arguments of the model for a text, and of its decoder for another. Raises InvalidRequest, or typer.Exit."""
    arguments = model_arguments(text, tokenizer)
    if bool(model.config.is_encoder_decoder) != (target is not None):
        needs = "needs --target, the text that its decoder reads" if target is None else "has no decoder of its own, so --target has no use"
        fail(command, f"the model {needs}", code=2)
    if target is not None:
        ids = tokenizer(text_target=target, return_tensors="pt").input_ids
        configs = model.config, getattr(model, "generation_config", None)
        starts = [getattr(config, "decoder_start_token_id", None) for config in configs] + [model.config.pad_token_id]  # as T5 begins
        start = next((token for token in starts if token is not None), None)
        if start is None:
            fail(command, "the config of the model has no decoder_start_token_id, with which its decoder begins")
        arguments["decoder_input_ids"] = ids.roll(1, 1).index_fill(1, ids.new_zeros(1), start)  # each token is predicted from those before
    return arguments


@contextmanager
def report_model_errors(command: str) -> Iterator[None]:
    """Turns what a model or a tokenizer raises for a text, for example if it is too long, into a message."""
    try:
        yield
    except typer.Exit:  # a RuntimeError
        raise
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError) as error:
        fail(command, f"the model cannot be run on this text: {str(error).strip().splitlines()[0]}")
