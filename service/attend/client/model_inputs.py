"""The arguments of a model for one pass, and why a pass failed."""

from collections.abc import Mapping
from typing import Any

from attend.errors import InvalidRequest
from attend.wire.problems import describe_value

TOKENS = ("input_ids", "decoder_input_ids")
POSITIONS = ("max_position_embeddings", "max_target_positions", "max_seq_len", "n_positions")  # of a config: how many a model has


def model_arguments(inputs: Any, tokenizer: Any) -> dict[str, Any]:
    """The arguments of a model: the inputs, or those of a text.

    Raises InvalidRequest for a text without a tokenizer or without tokens, and for what is neither a text nor arguments.
    """
    if isinstance(inputs, str):
        if not callable(tokenizer):
            got = "a text" if tokenizer is None else f"a text, and {describe_value(tokenizer)} as the tokenizer"
            raise InvalidRequest.where("/inputs", "the model's arguments, or a tokenizer with a text", got)
        arguments = dict(tokenizer(inputs, return_tensors="pt"))
        if not arguments["input_ids"].numel():
            raise InvalidRequest.where("/inputs", "a text with tokens", "none")
        return arguments
    if not isinstance(inputs, Mapping):
        several = isinstance(inputs, list | tuple) and any(isinstance(one, str) for one in inputs)
        expected = "one text, or the model's arguments by name: of several texts, tokenizer(texts, padding=True, return_tensors='pt')"
        raise InvalidRequest.where("/inputs", expected, "a list of texts" if several else f"a {type(inputs).__name__}")
    for name, value in inputs.items():
        if getattr(value, "is_nested", False):
            raise InvalidRequest.where(f"/inputs/{name}", "a padded tensor, with a mask of its padding", "a nested tensor")
        if name.endswith(("_ids", "_mask")) and value is not None and not hasattr(value, "is_nested"):  # no tensor
            expected = "a tensor, as tokenizer(text, return_tensors='pt') has it"
            raise InvalidRequest.where(f"/inputs/{name}", expected, describe_value(value))
    return dict(inputs)


def check_cache(arguments: Mapping[str, Any]) -> None:
    """Raises InvalidRequest if there is a cache with keys of an earlier pass, or of a fixed length: only rows of this pass are recorded."""
    cache = arguments.get("past_key_values")
    if cache is None:
        return
    length = cache.get_seq_length() if hasattr(cache, "get_seq_length") else None  # None: a tuple of earlier versions
    if length != 0 or getattr(cache, "is_compileable", False):
        got = f"a cache of {length} rows" if length else "a cache of a fixed length" if length == 0 else f"a {type(cache).__name__}"
        expected = "all rows of the sequence in one pass without past_key_values, since the rows behind a cache are not recorded"
        raise InvalidRequest.where("/inputs/past_key_values", expected, got)


def check_lengths(model: Any, arguments: Mapping[str, Any]) -> None:
    """Raises InvalidRequest if there are more tokens than the model has positions, or a token that is not in its vocabulary.

    Called after a pass has failed: some models have a number of positions in their config, and compute more, as all with RoPE do.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = (
        None if getattr(config, "rope_parameters", None) else next(filter(None, (getattr(config, name, None) for name in POSITIONS)), None)
    )
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    for name in TOKENS:
        ids = arguments.get(name)
        if ids is None or ids.ndim != 2:
            continue
        if limit is not None and ids.shape[1] > (own := limit - _unused_positions(model)):
            raise InvalidRequest.where(
                f"/inputs/{name}", f"at most {own} tokens, which are the model's positions", f"{ids.shape[1]} tokens"
            )
        size = getattr(embeddings, "num_embeddings", None)
        if size is not None and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            wrong = int(ids.max() if ids.max() >= size else ids.min())
            raise InvalidRequest.where(f"/inputs/{name}", f"ids of tokens below {size}, the size of the model's vocabulary", str(wrong))


def _unused_positions(model: Any) -> int:
    """How many rows of the table of positions no token has: RoBERTa numbers tokens from after the padding index."""
    named = (module for name, module in model.named_modules() if name.rpartition(".")[2] == "position_embeddings")
    return next((padding + 1 for module in named if (padding := getattr(module, "padding_idx", None)) is not None), 0)
