"""`attend heads FOLDER --text TEXT`: what each head of a model of transformers does to its answer to a text."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from attend.cli.clients import open_client
from attend.cli.model_folder import arguments_of, load_model, model_name, report_model_errors
from attend.cli.terminal import fail, progress_line, report_errors
from attend.client import Run, interventions
from attend.client.captures import Capture, capture
from attend.client.model_calls import count_unknown
from attend.tensors import Array

ANSWERS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")  # ends of the names of the classes that predict a token


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
    model, tokenizer = load_model("heads", folder, ANSWERS)
    with report_errors("heads"):
        inputs = arguments_of("heads", model, tokenizer, text, target)
    ids = inputs.get("decoder_input_ids", inputs["input_ids"])[0].tolist()
    position = len(ids) - 1
    if type(model).__name__.endswith("ForMaskedLM"):
        if tokenizer.mask_token_id not in ids:
            fail("heads", f"expected {tokenizer.mask_token or 'a mask token'} in --text, the token that the model predicts", code=2)
        position = ids.index(tokenizer.mask_token_id)
    if token is None:
        chosen = None
    else:
        found = tokenizer(token, add_special_tokens=False).input_ids
        if len(found) != 1 or found[0] == tokenizer.unk_token_id:
            fail("heads", f"expected one token in --token, got {tokenizer.convert_ids_to_tokens(found)}", code=2)
        chosen = found[0]
    console = Console(highlight=False, markup=False)
    with report_model_errors("heads"), report_errors("heads"), open_client(url, ca, config, flags) as client:
        progress = progress_line("switching off one head at a time", Console(stderr=True))
        with interventions(model, client) as study, progress:
            plain = study.run(inputs)
            chosen = int(plain.logits[0, position].argmax()) if chosen is None else chosen

            def log_probability(run: Run) -> float:
                return math.log(max(run.probability(chosen, position), np.finfo(float).tiny))

            effects = study.effects(inputs, log_probability)
            layers = study.layers
        word, probability = tokenizer.decode([chosen]), plain.probability(chosen, position)
        if file is not None:
            captured = capture(model, dict(inputs), client, tokenizer=tokenizer, name=model_name(folder))
            _save(captured.with_effects(word, probability, effects), file)
    if as_json:
        numbers = [[None if np.isnan(number) else number for number in row] for row in effects.tolist()]
        typer.echo(json.dumps({"token": word, "position": position, "probability": probability, "layers": layers, "effects": numbers}))
        return
    console.print(f"probability of {word!r} at token {position}: {probability:.3f}")
    console.print("change of its logarithm without each head; the less, the more the head adds to it:", soft_wrap=True)
    console.print(_table(layers if target is not None else [str(layer) for layer in range(len(layers))], effects))
    if unknown := count_unknown(inputs, tokenizer):
        console.print(f"{unknown} of the tokens are unknown to the tokenizer.", soft_wrap=True)


def _save(captured: Capture, file: Path) -> None:
    """Raises typer.Exit if it cannot be written."""
    try:
        captured.save(file)
    except OSError as error:
        fail("heads", f"cannot write {file}: {error.strerror}", "Give another file with --capture.")


def _table(layers: list[str], effects: Array) -> Table:
    table = Table(box=SIMPLE)
    for title in ("layer", *(f"head {head}" for head in range(effects.shape[1]))):
        table.add_column(title, justify="right")
    for layer, numbers in zip(layers, effects, strict=True):
        table.add_row(layer, *("" if np.isnan(number) else f"{number:.3f}" for number in numbers))
    return table
