"""A call of an attention layer inside a model, as fields of a request that repeats it: inputs, mask in the fewest fields, words."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from attend.client.model_inputs import TOKENS
from attend.errors import InvalidRequest
from attend.spec import LayerSpec
from attend.tensors import Array

HIDDEN = -9000.0  # numbers in a mask that are lower hide a key: models add -10000, or the lowest number of their dtype
SWIN_HIDDEN = -50.0  # Swin adds -100 to biases that are much smaller
SEQUENCES = {"encoder": ("input_ids",) * 2, "decoder": ("decoder_input_ids",) * 2, "cross": ("decoder_input_ids", "input_ids")}
MASKS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}  # sequence -> which of its tokens are real
VISIBLE: dict[str, Callable[[Array], Array]] = {  # field of a request -> the keys that it leaves visible
    **dict.fromkeys(("attend_keys", "attend_mask"), lambda mask: mask.astype(bool)),
    **dict.fromkeys(("block_keys", "block_mask"), lambda mask: ~mask.astype(bool)),
    "bias": lambda added: added > -np.inf,
}


@dataclass
class Call:
    """What one call of a layer got and gave. Arrays of inputs are [b, n, width]."""

    inputs: dict[str, Array] = field(default_factory=dict)  # query, key, value, positions
    output: Array | None = None
    weights: Array | None = None  # [b, h, q, k]
    mask: Array | None = None  # added to the scores, or bool with True for visible; [b or 1, h or 1, q or 1, k]
    has_mask: bool = False  # whether `mask` is known; None is then no mask
    pairs: Array | None = None  # [b or 1, 1, q, k] that the module of the layer got: may be a mask
    fields: dict[str, Any] = field(default_factory=dict)  # fields of a request, where the module was told its masks


def requests_of(call: Call, spec: LayerSpec, causal: bool | None, given: Array | None) -> list[dict[str, Any]]:
    """Fields of POST /attend that repeat the call; several, of which one does, if its mask is not known.

    `causal`: whether the layer is, where no mask says it; None: unknown. `given`: what the arguments of the model say, likewise, as
    `given_mask` returns it. A batch of one has no axis.
    """
    query, key, value = (call.inputs[name] for name in ("query", "key", "value"))
    fields: dict[str, Any] = {"query": query}
    if not (_same(query, key) and _same(key, value)):
        fields |= {"key": key} | ({} if _same(key, value) else {"value": value})
    if "positions" in call.inputs:
        fields |= dict.fromkeys(("positions", "key_positions") if "key" in fields else ("positions",), call.inputs["positions"])
    mask = call.mask if call.has_mask else given if given is not None and given.ndim == 4 else _visible_by(call.pairs, given)
    if call.has_mask or mask is not None:
        shape = len(query), query.shape[1], key.shape[1]
        masks = [_mask_fields(visible, spec, shape, call.weights) | call.fields for visible in visible_pairs(mask)]
    else:
        if given is not None and (len(given) not in (1, len(query)) or given.shape[1] != key.shape[1]):
            expected = f"a mask of the layer's {len(query)} batch items and {key.shape[1]} keys"
            raise InvalidRequest.where("/inputs", expected, str(list(given.shape)))
        keys = {} if given is None or given.all() else {"attend_keys": given.astype(bool)}
        masks = [keys | ({"causal": True} if one else {}) for one in ((causal,) if causal is not None else (False, True))]
        masks = [mask | _fully_masked(seen_rows(fields | mask, spec), call.weights) for mask in masks]
    return [_without_batch(fields | mask) if len(query) == 1 else fields | mask for mask in masks]


def _visible_by(pairs: Array | None, given: Array | None) -> Array | None:
    """A tensor of 0 and 1, [b or 1, 1, q, k], as bool, if its ones are of the keys of real tokens, `given` [b, k]; None if it is no mask.

    DeBERTa's says that rows of padding see no key.
    """
    if pairs is None or given is None or not np.isin(pairs, (0, 1)).all():
        return None
    return pairs.astype(bool) if np.array_equal(pairs.any((1, 2)), given.astype(bool)) else None


def seen_rows(fields: Mapping[str, Any], spec: LayerSpec) -> Array:
    """bool [b or 1, h or 1, q], without b for an unbatched query: the rows of a request that see a key. Rows of padding may see none."""
    query = fields["query"]
    is_alone = query.ndim == 2
    visible = _allowed(spec, fields.get("causal", False), query.shape[-2], fields.get("key", query).shape[-2])[None, None]
    for name, is_visible in VISIBLE.items():
        if name in fields:
            mask = np.asarray(fields[name])
            mask = mask[None] if is_alone else mask
            mask = (
                mask[:, None, None] if name.endswith("_keys") else mask[:, None] if mask.ndim == 3 else mask
            )  # [b or 1, h or 1, q or 1, k]
            visible = visible & is_visible(mask)
    seen: Array = np.asarray(visible.any(-1))
    return seen[0] if is_alone else seen


def _fully_masked(seen: Array, weights: Array | None) -> dict[str, Any]:
    """`fully_masked` for rows without keys, [b, h, q], as the model's own weights are there, [b, h, q, k]: 0 if a sink takes them, else
    equal, since models add the lowest number to all scores.
    """
    if seen.all():
        return {}
    if weights is not None:
        given: Array = np.asarray(weights.any((1, 3)))  # [b, q]
        if not given[~np.broadcast_to(seen.any(1), given.shape)].any():
            return {}
    return {"fully_masked": "uniform"}


def _same(one: Array, other: Array) -> bool:
    return one.shape == other.shape and np.array_equal(one, other)


def visible_pairs(mask: Array | None) -> list[Array | None]:
    """Which keys a mask may mean, bool: those without a very low number, and if it has numbers as Swin's, those without one of them."""
    if mask is None or mask.dtype == bool:
        return [mask]
    return [mask > HIDDEN, *([mask > SWIN_HIDDEN] if ((mask > HIDDEN) & (mask <= SWIN_HIDDEN)).any() else [])]


def _mask_fields(visible: Array | None, spec: LayerSpec, shape: tuple[int, int, int], weights: Array | None) -> dict[str, Any]:
    """`causal` and `attend_keys` if they say the same as a mask, with the layer's own window and chunks; else the mask of each pair.

    `visible`: the mask, bool; None: all keys. `shape`: batch, queries, keys. `weights`: the model's own.
    """
    if visible is None:
        return {}
    visible = np.broadcast_to(visible, (shape[0], visible.shape[1], *shape[1:]))
    keys: Array = np.asarray(visible.any((1, 2)))
    fields = _fully_masked(np.asarray(visible.any(-1)), weights)
    fields |= {} if keys.all() else {"attend_keys": keys}
    for causal in (False, True):
        if (visible == keys[:, None, None] & _allowed(spec, causal, *shape[1:])).all():
            return fields | ({"causal": True} if causal else {})
    one = (visible == visible[:, :1]).all()
    return {name: value for name, value in fields.items() if name != "attend_keys"} | {"attend_mask": visible[:, 0] if one else visible}


def _allowed(spec: LayerSpec, causal: bool, queries: int, keys: int) -> Array:
    """bool [q, k]: what the layer's window and chunks, and `causal`, let each query see."""
    i, j = np.arange(queries)[:, None], np.arange(keys)
    allowed = np.ones((queries, keys), bool)
    if causal:
        allowed &= j <= i
    for left, right, chunk in spec.intervals:
        allowed &= (left is None or j >= i - left) & (right is None or j <= i + right)
        if chunk is not None:
            allowed &= i // chunk == j // chunk
    return allowed


def _without_batch(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without the first axis of their tensors, which has length 1."""
    return {name: value[0] if isinstance(value, np.ndarray) else value for name, value in fields.items()}


def has_batch_second(call: Call, arguments: Mapping[str, Array], part: str) -> bool:
    """Whether the layer got its rows as [n, b, width]: its query has the axes of the model's tokens, [b, n], in the other order."""
    name = _sequences(arguments, part)[0]
    tokens = arguments.get(name, arguments.get(name.replace("input_ids", "inputs_embeds")))
    if tokens is None or tokens.ndim < 2 or call.has_mask:  # a mask that is known is that of an attention function, or of a torch module
        return False
    batch, rows = tokens.shape[:2]
    return batch != rows and call.inputs["query"].shape[:2] == (rows, batch)


def batch_first(call: Call) -> Call:
    """The call of a layer that has the batch second."""
    output = None if call.output is None else call.output.swapaxes(0, 1)
    return replace(call, inputs={name: value.swapaxes(0, 1) for name, value in call.inputs.items()}, output=output)


def given_mask(arguments: Mapping[str, Array], part: str) -> Array | None:
    """The mask of the keys of this part among a model's arguments: which tokens are real [b, k], or as in `Call`; None if there is none."""
    mask = arguments.get(MASKS[_sequences(arguments, part)[1]])
    return None if mask is None or mask.ndim not in (2, 4) else mask


def real_queries(arguments: Mapping[str, Any], is_decoder: bool, rows: tuple[int, ...]) -> Array | None:
    """bool [b, q]: which queries of a call are real tokens, as the model's arguments say; None if they do not. `rows`: how many queries
    and keys it has."""
    mask = arguments.get(MASKS[_sequences(arguments, "decoder" if is_decoder else "encoder")[0]])
    if mask is None or mask.ndim != 2 or mask.shape[1] not in rows or mask.shape[1] < rows[0]:
        return None
    return np.asarray(mask).astype(bool)[:, mask.shape[1] - rows[0] :]  # that of a call with a cache is also of earlier rows


def _sequences(arguments: Mapping[str, Any], part: str) -> tuple[str, str]:
    """The names of the arguments that have the tokens of queries and keys."""
    return SEQUENCES.get(part, SEQUENCES["encoder"]) if "decoder_input_ids" in arguments else SEQUENCES["encoder"]


def words_of(arguments: Mapping[str, Any], part: str, tokenizer: Any, queries: int, keys: int) -> dict[str, list[Any]]:
    """The field `tokens` for a layer of this part: words of the tokenizer, or else numbers of tokens; {} if its rows are no tokens."""
    found: dict[str, list[Any]] = {}
    for side, name, count in zip(("query", "key"), _sequences(arguments, part), (queries, keys), strict=True):
        ids = arguments.get(name)
        if ids is not None and ids.ndim == 2 and ids.shape[1] == count:
            words = [[_word(int(i), tokenizer) for i in row] for row in ids]
            found[side] = words if len(words) > 1 else words[0]
    if "key" in found and "query" not in found:
        return {}
    return {"query": found["query"]} if found.get("key") == found.get("query") and found else found


def _word(number: int, tokenizer: Any) -> str:
    """A token as people read it; as the vocabulary has it, if it is a part of a character or a space."""
    if tokenizer is None:
        return str(number)
    text = str(tokenizer.decode([number])).strip()
    return text if text and "\ufffd" not in text else str(tokenizer.convert_ids_to_tokens(number))


def count_unknown(arguments: Mapping[str, Any], tokenizer: Any) -> int:
    """How many tokens stand for words that the tokenizer does not know."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    given: Iterable[Any] = (arguments[name] for name in TOKENS if arguments.get(name) is not None)
    return 0 if unknown is None else sum(int((np.asarray(ids) == unknown).sum()) for ids in given)
