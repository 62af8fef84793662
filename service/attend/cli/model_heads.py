"""`attend heads FOLDER --text TEXT`: what each head of a model of transformers does to its answer to a text."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console

from attend.cli.clients import open_client
from attend.cli.model_folder import arguments_of, load_model, model_name, report_model_errors, written
from attend.cli.terminal import fail, progress_line, report_errors
from attend.client import Client, Run, interventions
from attend.client.captures import Capture, capture
from attend.client.model_calls import count_unknown
from attend.tensors import Array

ANSWERS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")  # ends of the names of the classes that predict a token


@dataclass(frozen=True)
class Effects:
    """What each head adds to the log-probability of one token that a model predicts."""

    token: int
    position: int
    probability: float
    layers: list[str]
    changes: Array  # without each head, [layers, heads]; nan where a layer has fewer heads


def show_effects(
    folder: Path,
    text: str,
    token: str | None,
    target: str | None,
    file: Path | None,
    url: str | None,
    ca: Path | None,
    as_json: bool,
    config: Path | None,
    flags: Mapping[str, Any],
) -> None:
    """Prints the change of the token's log-probability without each head, [layers, heads]; writes it and the layers to `file`."""
    if target is not None and file is not None:  # a capture has the layers of an encoder-decoder in another order than its effects
        fail("heads", "expected --capture without --target: captures of encoder-decoders have no map of effects", code=2)
    model, tokenizer = _load(folder)
    with report_errors("heads"):
        inputs = arguments_of("heads", model, tokenizer, text, target)
    position, place = _prediction(model, tokenizer, inputs)
    chosen = None if token is None else _single_token(tokenizer, token)
    captured = None
    with report_model_errors("heads"), report_errors("heads"), open_client(url, ca, config, flags) as client:
        found = _effects(model, client, inputs, position, chosen)
        word = tokenizer.decode([found.token])
        if file is not None:
            captured = capture(model, dict(inputs), client, tokenizer=tokenizer, name=model_name(folder))
            captured = captured.with_effects(word, found.probability, found.changes)
    console = Console(highlight=False, markup=False)
    if as_json:
        numbers = [[None if np.isnan(number) else number for number in row] for row in found.changes.tolist()]
        document = {"token": word, "position": position, "probability": found.probability, "layers": found.layers, "effects": numbers}
        typer.echo(json.dumps(document | ({} if file is None else {"file": str(file)})))
    else:
        console.print(f"probability of {word!r} {place}: {found.probability:.3f}", soft_wrap=True)
        console.print("change of its logarithm without each head; the less, the more the head adds to it:", soft_wrap=True)
        names = found.layers if target is not None else [str(layer) for layer in range(len(found.layers))]
        for text_line in _lines(names, found.changes, console.width):
            console.print(text_line, soft_wrap=True)
        if unknown := count_unknown(inputs, tokenizer):
            console.print(f"{unknown} of the tokens are unknown to the tokenizer.", soft_wrap=True)
    if captured is not None and file is not None:
        _save(captured, file)
        if not as_json:
            console.print(written(file, url), soft_wrap=True)


def _load(folder: Path) -> tuple[Any, Any]:
    """The model and its tokenizer. Raises typer.Exit if its heads cannot be switched off."""
    from attend.client.transformers import takes_functions

    model, tokenizer = load_model("heads", folder, ANSWERS)
    if not takes_functions(model):
        message = f"the attention of {type(model).__name__} is code of its own, so its heads cannot be switched off"
        fail("heads", message, "`attend capture` records what the heads of most such models attend to.", code=2)
    return model, tokenizer


def _prediction(model: Any, tokenizer: Any, inputs: Mapping[str, Any]) -> tuple[int, str]:
    """The position whose logits predict the token, and where that is in words: after the last token, or at the mask. Raises typer.Exit."""
    ids = inputs.get("decoder_input_ids", inputs["input_ids"])[0].tolist()
    if not type(model).__name__.endswith("ForMaskedLM"):
        last = len(ids) - 1
        return last, f"after token {last} ({tokenizer.decode(ids[last])!r})"
    if tokenizer.mask_token_id not in ids:
        fail("heads", f"expected {tokenizer.mask_token or 'a mask token'} in --text, the token that the model predicts", code=2)
    position = ids.index(tokenizer.mask_token_id)
    return position, f"at token {position}, the mask"


def _single_token(tokenizer: Any, text: str) -> int:
    """The id of the only token of the text. Raises typer.Exit."""
    found = tokenizer(text, add_special_tokens=False).input_ids
    if len(found) != 1 or found[0] == tokenizer.unk_token_id:
        fail("heads", f"expected one token in --token, got {tokenizer.convert_ids_to_tokens(found)}", code=2)
    return int(found[0])


def _effects(model: Any, client: Client, inputs: Mapping[str, Any], position: int, chosen: int | None) -> Effects:
    """Runs the model with all heads, then without each. `chosen`: a token; None: the most probable one."""
    with interventions(model, client) as study, progress_line("running the model", Console(stderr=True)) as line:
        plain = study.run(inputs)
        runs, heads = count(), sum(weights.shape[1] for weights in plain.attention_weights)
        token = int(plain.logits[0, position].argmax()) if chosen is None else chosen

        def log_probability(run: Run) -> float:
            line.show(f"switching off one head at a time: {next(runs)} of {heads}")  # the first run is with all heads
            return math.log(max(run.probability(token, position), np.finfo(float).tiny))

        changes = study.effects(inputs, log_probability)
        return Effects(token, position, plain.probability(token, position), study.layers, changes)


def _save(captured: Capture, file: Path) -> None:
    """Raises typer.Exit if it cannot be written."""
    try:
        captured.save(file)
    except OSError as error:
        fail("heads", f"cannot write {file}: {error.strerror}", "Give another file with --capture.")


def _lines(layers: list[str], effects: Array, width: int) -> Iterator[str]:
    """A line for each layer, with its heads beside each other; those that do not fit into the width are in another block of lines below.
    No number is cut."""
    titles = [f"head {head}" for head in range(effects.shape[1])]
    rows = [["" if np.isnan(number) else f"{number:.3f}" for number in numbers] for numbers in effects]
    first, cell = (max(map(len, texts)) for texts in (["layer", *layers], [*titles, *(text for row in rows for text in row)]))
    most = max(1, (width - first) // (cell + 2))
    beside = math.ceil(len(titles) / math.ceil(len(titles) / most))
    for start in range(0, len(titles), beside):
        yield ""
        for label, texts in zip(["layer", *layers], [titles, *rows], strict=True):
            yield label.rjust(first) + "".join(f"  {text:>{cell}}" for text in texts[start : start + beside])
