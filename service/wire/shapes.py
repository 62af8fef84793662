"""Checks the fields of one request against each other: shapes, and fields that require or exclude others.

b batch, h heads, q queries, k keys. An unbatched request has no b in any field. `serving/binding.py` checks what depends on the
layer (h and the widths).
"""

from typing import Any

from service.spec_parts import field_error
from service.tensors import Array
from service.wire.arrays import element_text, first_index, without_broadcast
from service.wire.problems import describe_value
from service.wire.suggestions import did_you_mean

MASK_FIELDS = ("attend_mask", "block_mask", "attend_keys", "block_keys", "valid_lens", "segments", "query_segments", "key_segments")
UNPACKED = (*MASK_FIELDS, "bias", "dropout")  # fields that a request with sequences one after the other cannot have
EXCLUSIVE = (("attend_mask", "block_mask"), ("attend_keys", "block_keys"))


def check(request: Any) -> None:
    """Raises PydanticCustomError at the first field of an AttendRequest that does not fit the others."""
    b, q, k = _sequences(request)
    for attend, block in EXCLUSIVE:
        if getattr(request, attend) is not None and getattr(request, block) is not None:
            raise field_error(f"/{block}", f"either {attend} or {block}", "both")
    for name in ("attend_mask", "block_mask", "bias"):
        if (array := getattr(request, name)) is not None:
            _pairwise(name, array, b, q, k)
    for name in ("attend_keys", "block_keys"):
        _per_row(request, name, b, k)
    _segments(request, b, q, k)
    _lengths(request, b, q, k)
    _packed(request, b, q, k)
    _positions(request, b, q, k)
    _rotary_positions(request, b, {"positions": q, "key_positions": k})
    _head_scale(request, b)
    _selection(request, q)
    _gradients(request)
    _tokens(request, b, q, k)


def _sequences(request: Any) -> tuple[int | None, int, int]:
    query, key, value = request.query, request.key, request.value
    if value is not None and key is None:
        raise field_error("/value", "a key in addition to the value", "a value alone")
    key = query if key is None else key
    value = key if value is None else value
    for name, array in (("key", key), ("value", value)):
        if array.ndim != query.ndim:
            raise field_error(f"/{name}", f"rank {query.ndim}, as the query has", f"rank {array.ndim}")
        if array.ndim == 3 and array.shape[0] != query.shape[0]:
            raise field_error(f"/{name}", f"{query.shape[0]} batch items, as the query has", str(array.shape[0]))
    if value.shape[-2] != key.shape[-2]:
        raise field_error("/value", f"{key.shape[-2]} rows, as the key has", str(value.shape[-2]))
    return (query.shape[0] if query.ndim == 3 else None), query.shape[-2], key.shape[-2]


def _broadcasts(array: Array, wanted: tuple[int | None, ...]) -> bool:
    """Whether every axis has the wanted length or 1; None stands for any length."""
    return array.ndim == len(wanted) and all(w is None or n in (1, w) for n, w in zip(array.shape, wanted, strict=True))


def _pairwise(name: str, array: Array, b: int | None, q: int, k: int) -> None:
    accepted: list[tuple[int | None, ...]] = [(q, k), (b, q, k), (b, None, q, k)] if b is not None else [(q, k), (None, q, k)]
    if not any(_broadcasts(array, shape) for shape in accepted):
        shapes = " or ".join("[" + ", ".join("heads" if n is None else str(n) for n in shape) + "]" for shape in accepted)
        raise field_error(f"/{name}", f"shape {shapes} (axes of 1 broadcast)", f"shape {list(array.shape)}")


def _per_row(request: Any, name: str, b: int | None, n: int) -> None:
    """Checks that a field has a value for each query or key; axes of 1 are broadcast."""
    wanted, array = (n,) if b is None else (b, n), getattr(request, name)
    if array is not None and not _broadcasts(array, wanted):
        raise field_error(f"/{name}", f"shape {list(wanted)}", f"shape {list(array.shape)}")


def _segments(request: Any, b: int | None, q: int, k: int) -> None:
    sides = [name for name in ("query_segments", "key_segments") if getattr(request, name) is not None]
    if request.segments is not None and sides:
        raise field_error(f"/{sides[0]}", "either segments, or query_segments and key_segments", "both")
    if len(sides) == 1:
        raise field_error(f"/{sides[0]}", "query_segments and key_segments", f"{sides[0]} alone")
    for name, n in (("query_segments", q), ("key_segments", k), ("segments", q), ("segments", k)):
        _per_row(request, name, b, n)


def _lengths(request: Any, b: int | None, q: int, k: int) -> None:
    lengths = request.valid_lens
    if lengths is None:
        return
    accepted = [(), (q,)] if b is None else [(b,), (b, q)]
    if lengths.shape not in accepted:
        several = f"{q} numbers, one for each query" if b is None else f"{b} numbers, one for each batch item, or shape [{b}, {q}]"
        got = {0: "a single number", 1: f"a list of {lengths.size}"}.get(lengths.ndim, f"shape {list(lengths.shape)}")
        raise field_error("/valid_lens", f"a single number, or {several}" if b is None else several, got)
    stored = without_broadcast(lengths)
    if (wrong := stored > k).any():
        at = first_index(wrong)
        raise field_error(f"/valid_lens{at}", f"at most {k}, the number of keys", element_text(stored, at))


def _packed(request: Any, b: int | None, q: int, k: int) -> None:
    """Checks sequences one after the other in one query, whose numbers of rows are `query_lengths`."""
    queries, keys = request.query_lengths, request.key_lengths
    if queries is None:
        if keys is not None:
            raise field_error("/key_lengths", "query_lengths and key_lengths", "key_lengths alone")
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
    for name in UNPACKED:
        if getattr(request, name) is not None:
            raise field_error(f"/{name}", f"no {name} beside query_lengths", "both")
    for name in ("queries", "top_k"):
        if request.select is not None and getattr(request.select, name) is not None:
            raise field_error(f"/select/{name}", f"no {name} beside query_lengths", "both")


def unaligned(request: Any, q: int, k: int) -> bool:
    """Whether queries and keys, of any sequence, differ in number."""
    keys = request.key_lengths
    return q != k if keys is None else bool((keys != request.query_lengths).any())


def _positions(request: Any, b: int | None, q: int, k: int) -> None:
    offset = request.query_offset
    if isinstance(offset, list) and (b is None or len(offset) != b):
        wanted = 'one integer or "end"' if b is None else f"{b} offsets, one per batch item"
        raise field_error("/query_offset", wanted, f"a list of {len(offset)}")
    if offset is None and unaligned(request, q, k) and (request.causal or request.window is not None):
        field = "causal" if request.causal else "window"
        expected = f'an offset (0, "end", …), since {field} is on and {q} queries and {k} keys are given'
        raise field_error("/query_offset", expected, "nothing")


def _rotary_positions(request: Any, b: int | None, rows: dict[str, int]) -> None:
    given = [name for name in rows if getattr(request, name) is not None]
    if given == ["key_positions"]:
        raise field_error("/key_positions", "positions in addition to key_positions", "key_positions alone")
    if given == ["positions"] and request.key is not None:
        raise field_error("/key_positions", "the positions of the keys, as there are some of the queries", "nothing")
    if len(given) == 2 and request.key is None:
        raise field_error("/key_positions", "positions alone, since the key is the query", "both")
    for name in given:
        shape, lead = getattr(request, name).shape, () if b is None else (b,)
        wanted = (*lead, rows[name])
        if not (shape[: len(wanted)] in (wanted, (1, *wanted[1:])) and len(shape) - len(wanted) in (0, 1)):
            text = ", ".join(map(str, wanted))
            raise field_error(f"/{name}", f"shape [{text}] or [{text}, axes]", f"shape {list(shape)}")


def _head_scale(request: Any, b: int | None) -> None:
    array = request.head_scale
    if array is not None and array.ndim == 2 and (b is None or array.shape[0] != b):
        wanted = "shape [heads]" if b is None else f"shape [heads] or [{b}, heads]"
        raise field_error("/head_scale", wanted, f"shape {list(array.shape)}")


def _selection(request: Any, q: int) -> None:
    if request.reply.decimals is not None and request.reply.form == "base64":
        raise field_error("/reply/decimals", "numbers in text to round", "form base64")
    if (select := request.select) is None:
        return
    if "attention_weights" not in request.outputs:
        raise field_error("/select", "attention_weights among the outputs", "a selection without them")
    for i, index in enumerate(select.queries or ()):
        if index >= q:
            raise field_error(f"/select/queries/{i}", f"a query below {q}", str(index))


def _gradients(request: Any) -> None:
    gradients = [f"{name}_gradient" for name in ("query", "key", "value") if f"{name}_gradient" in request.outputs]
    if gradients and request.output_gradient is None:
        raise field_error("/output_gradient", f"a gradient of the output, since {gradients[0]} is among the outputs", "nothing")
    if request.output_gradient is not None and not gradients:
        raise field_error("/output_gradient", "query_gradient, key_gradient or value_gradient among the outputs", "none of them")


def _tokens(request: Any, b: int | None, q: int, k: int) -> None:
    if request.tokens is None:
        return
    for name, tokens, n in (("query", request.tokens.query, q), ("key", request.tokens.key, k)):
        rows = [[]] if tokens == [] else _rows(tokens)
        if rows and rows is tokens and (b is None or len(rows) != b):
            raise field_error(f"/tokens/{name}", "one list, or one per batch item", f"{len(rows)} lists")
        for row in rows:
            if len(row) != n:
                raise field_error(f"/tokens/{name}", f"{n} tokens, one per row of the {name}", str(len(row)))
    if request.tokens.omit:
        _omission(request)


def _omission(request: Any) -> None:
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
