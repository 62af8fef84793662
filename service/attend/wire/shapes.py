"""Checks the fields of one request against each other: shapes, and fields that require or exclude others.

`axes.py` has the axes of each tensor. `serving/layer_checks.py` checks what depends on the layer: heads and widths.
"""

from collections.abc import Mapping
from typing import Any

from attend.axes import GRADIENTS, TENSOR_FIELDS, TensorField
from attend.errors import did_you_mean
from attend.spec_parts import field_error
from attend.tensors import Array
from attend.wire.arrays import first_element, without_broadcast
from attend.wire.problems import describe_value

MAX_POSITION = 2**31  # of those by which RoPE rotates, whose angles are float64
NOT_PACKED = (*(name for name, field in TENSOR_FIELDS.items() if not field.packed), "dropout")  # with sequences one after the other


def check_fields_together(request: Any) -> None:
    """Raises PydanticCustomError at the first field of an AttendRequest that does not fit the others."""
    given = {name: field for name, field in TENSOR_FIELDS.items() if getattr(request, name, None) is not None}
    for name, field in given.items():
        if field.excludes in given:
            raise field_error(f"/{name}", f"either {field.excludes} or {name}", "both")
        if field.needs and getattr(request, field.needs) is None:
            raise field_error(f"/{name}", f"{field.needs} in addition to {name}", f"{name} alone")
    b, q, k = _check_query_key_value(request)
    for name, field in given.items():
        for n in (q, k) if "n" in field else (q,):
            keys = k - request.past if field.new_rows else k
            _require_axes(name, field, getattr(request, name), {"b": b, "q": q, "k": keys, "n": n})
    _check_positions(request)
    _check_valid_lens(request, k)
    _check_query_lengths(request, b, q, k)
    _check_query_offset(request, b, q, k)
    _check_selection(request, q)
    _check_gradients(request)
    _check_tokens(request, b, q, k)


def _check_query_key_value(request: Any) -> tuple[int | None, int, int]:
    """(batch items, None without a batch; queries; keys, those of a session included)."""
    query = request.query
    b, q = query.shape[0] if query.ndim == 3 else None, query.shape[-2]
    if request.in_session and b not in (None, 1):
        raise field_error("/query", "one sequence, with a batch axis of 1 or none", f"{b} batch items")
    if not request.has_keys:
        return b, q, request.past
    key, value = request.key_rows, request.value_rows
    for name, array in (("key", key), ("value", value)):
        if array.ndim != query.ndim:
            raise field_error(f"/{name}", f"rank {query.ndim}, as the query has", f"rank {array.ndim}")
        if array.ndim == 3 and array.shape[0] != query.shape[0]:
            raise field_error(f"/{name}", f"{query.shape[0]} batch items, as the query has", str(array.shape[0]))
    if value.shape[-2] != key.shape[-2]:
        raise field_error("/value", f"{key.shape[-2]} rows, as the key has", str(value.shape[-2]))
    return b, q, request.num_keys


def _require_axes(name: str, field: TensorField, array: Array, lengths: Mapping[str, int | None]) -> None:
    """Checks that a tensor has the axes of its field. Those without a length, heads and widths, may have any."""
    shapes = field.unbatched if lengths["b"] is None else field.shapes
    for shape in shapes:
        if len(shape) == array.ndim and all(
            lengths.get(axis, n) == n or (n == 1 and axis in field.broadcast) for axis, n in zip(shape, array.shape, strict=True)
        ):
            return
    named = [[str(lengths.get(axis, "heads" if axis == "h" else axis)) for axis in shape] for shape in shapes]
    texts = " or ".join(f"[{', '.join(shape)}]" for shape in named if shape)
    expected = "a single number, or " * (() in shapes) + f"shape {texts}" + f" ({field.broadcasts})" * bool(field.broadcast)
    raise field_error(f"/{name}", expected, f"shape {list(array.shape)}" if array.ndim else "a single number")


def _check_valid_lens(request: Any, k: int) -> None:
    if request.valid_lens is None:
        return
    stored = without_broadcast(request.valid_lens)
    if (wrong := stored > k).any():
        at, got = first_element(stored, wrong)
        raise field_error(f"/valid_lens{at}", f"at most {k}, the number of keys", got)


def _check_query_lengths(request: Any, b: int | None, q: int, k: int) -> None:
    """Checks sequences one after the other in one query, whose numbers of rows are `query_lengths`."""
    queries, keys = request.query_lengths, request.key_lengths
    if queries is None:
        return
    if b is not None:
        raise field_error("/query", "shape [rows of all sequences, width], since query_lengths is given", "a batch")
    if (keys is None) != (request.key is None):
        given, missing = ("key", "key_lengths") if keys is None else ("key_lengths", "key")
        raise field_error(f"/{missing}", f"{missing}, since query_lengths and {given} are given", "nothing")
    if not len(queries):
        raise field_error("/query_lengths", "at least one sequence", "none")
    for name, lengths, n in (("query", queries, q), ("key", keys, k)):
        if lengths is not None and lengths.sum() != n:
            raise field_error(f"/{name}_lengths", f"lengths with the sum {n}, the rows of the {name}", f"the sum {lengths.sum()}")
    if keys is not None and len(keys) != len(queries):
        raise field_error("/key_lengths", f"{len(queries)} lengths, as query_lengths has", str(len(keys)))
    for name in NOT_PACKED:
        if getattr(request, name, None) is not None:
            raise field_error(f"/{name}", f"no {name} beside query_lengths", "both")
    for name in ("queries", "top_k"):
        if request.select is not None and getattr(request.select, name) is not None:
            raise field_error(f"/select/{name}", f"no {name} beside query_lengths", "both")


def unaligned(request: Any, q: int, k: int) -> bool:
    """Whether queries and keys, of any sequence, differ in number."""
    keys = request.key_lengths
    return q != k if keys is None else bool((keys != request.query_lengths).any())


def _check_query_offset(request: Any, b: int | None, q: int, k: int) -> None:
    offset = request.query_offset
    if isinstance(offset, list) and (b is None or len(offset) != b):
        wanted = 'one integer or "end"' if b is None else f"{b} offsets, one per batch item"
        raise field_error("/query_offset", wanted, f"a list of {len(offset)}")
    if offset is None and unaligned(request, q, k) and (request.causal or request.window is not None):
        field = "causal" if request.causal else "window"
        expected = f'an offset (0, "end", …), since {field} is on and {q} queries and {k} keys are given'
        raise field_error("/query_offset", expected, "nothing")


def _check_positions(request: Any) -> None:
    given = [name for name in ("positions", "key_positions") if getattr(request, name) is not None]
    if given == ["positions"] and request.key is not None:
        raise field_error("/key_positions", "the positions of the keys, as there are some of the queries", "nothing")
    if len(given) == 2 and request.key is None:
        raise field_error("/key_positions", "positions alone, since the key is the query", "both")
    for name in given:
        stored = without_broadcast(getattr(request, name))
        if (wrong := (stored > MAX_POSITION) | (stored < -MAX_POSITION)).any():
            at, got = first_element(stored, wrong)
            raise field_error(f"/{name}{at}", f"positions from -{MAX_POSITION} to {MAX_POSITION}", got)


def _check_selection(request: Any, q: int) -> None:
    if request.reply.decimals is not None and request.reply.form == "base64":
        raise field_error("/reply/decimals", "numbers in text to round", "form base64")
    if (select := request.select) is None:
        return
    if "attention_weights" not in request.outputs:
        raise field_error("/select", "attention_weights among the outputs", "a selection without them")
    for i, index in enumerate(select.queries or ()):
        if index >= q:
            raise field_error(f"/select/queries/{i}", f"a query below {q}", str(index))


def _check_gradients(request: Any) -> None:
    gradients = [name for name in GRADIENTS if name in request.outputs]
    if gradients and request.output_gradient is None:
        raise field_error("/output_gradient", f"a gradient of the output, since {gradients[0]} is among the outputs", "nothing")
    if request.output_gradient is not None and not gradients:
        raise field_error("/output_gradient", f"{' or '.join(GRADIENTS)} among the outputs", "none of them")


def _check_tokens(request: Any, b: int | None, q: int, k: int) -> None:
    if request.tokens is None:
        return
    for name, tokens, n in (("query", request.tokens.query, q), ("key", request.tokens.key, k)):
        rows = [[]] if tokens == [] else _rows(tokens)
        if rows and rows is tokens and (b is None or len(rows) != b):
            reason = ", since the query has no batch axis" if b is None else f", or {b}, one per batch item"
            raise field_error(f"/tokens/{name}", f"one list of tokens{reason}", f"{len(rows)} in a list")
        for row in rows:
            if len(row) != n:
                raise field_error(f"/tokens/{name}", f"{n} tokens, one per row of the {name}", str(len(row)))
    if request.tokens.omit:
        _check_omission(request)


def _check_omission(request: Any) -> None:
    """Tokens to omit must occur, and leave a query and a key in each batch item."""
    omit, sides = request.tokens.omit, {side: _rows(request.tokens_of(side)) for side in ("query", "key")}
    if isinstance(omit, list):
        known = {token for rows in sides.values() for row in rows for token in row}
        for i, token in enumerate(omit):
            if token not in known:
                got = describe_value(token) + did_you_mean(token, sorted(known))
                raise field_error(f"/tokens/omit/{i}", "a token of the queries or keys", got)
    for side, rows in sides.items():
        for i, row in enumerate(rows):
            if row and all(map(request.tokens.omits, row)):
                of_item = f" of item {i}" if len(rows) > 1 else ""
                raise field_error("/tokens/omit", f"at least one {side}{of_item} that is not omitted", f"all {len(row)} omitted")


def _rows(tokens: Any) -> list[list[str]]:
    """The lists of tokens of the batch items, or the one list for all; none without tokens."""
    return [] if not tokens else [tokens] if isinstance(tokens[0], str) else tokens
