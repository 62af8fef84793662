"""Validation of requests to a session, whose keys are its cached rows: only their shapes are needed. Checks that no needed row is freed."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from attend.attention.cache import cached_tensors
from attend.attention.call import Call
from attend.axes import TENSOR_FIELDS
from attend.errors import InvalidRequest, SessionConflict
from attend.serving.layer_checks import check_against_layer
from attend.serving.layers.registry import LoadedLayer
from attend.serving.sessions.registry import Session
from attend.spec import LayerSpec
from attend.tensors import shape_alone
from attend.wire.problems import validate
from attend.wire.schemas.attend import AttendRequest

ROW_FIELDS = [name for name, field in TENSOR_FIELDS.items() if field.new_rows]  # that have the new rows
KEY_ROWS = [name for name in ROW_FIELDS if "k" in TENSOR_FIELDS[name]]
SEQUENCE_LENGTHS = [name for name, field in TENSOR_FIELDS.items() if "sequences" in field]
NULLABLE_FIELDS = {name for name, field in AttendRequest.model_fields.items() if field.default is None}


def members_with_session_keys(session: Session, members: Mapping[str, Any]) -> dict[str, Any]:
    """The members of a request that names a session, with all keys of that session in place of its name. Raises InvalidRequest."""
    own = {name: value for name, value in given(members).items() if name != "session"}
    for name in ("layer", *KEY_ROWS, *SEQUENCE_LENGTHS):
        if name in own:
            raise InvalidRequest.where(f"/{name}", f"no {name} beside session", name)
    return with_all_keys(own, new_rows(own, session.layer, append=False), session, session.length)


def given(members: Mapping[str, Any]) -> dict[str, Any]:
    """The members that are given: null means for most fields that they are left out."""
    return {name: value for name, value in members.items() if value is not None or name not in NULLABLE_FIELDS}


def new_rows(members: Mapping[str, Any], layer: LoadedLayer, append: bool) -> AttendRequest:
    """The rows of the request, checked against the layer. If nothing is appended, key and value have no rows. Raises InvalidRequest."""
    fields = {name: members[name] for name in ROW_FIELDS if name in members}
    takes_value = "value" in cached_tensors(layer.spec)
    if not append and isinstance(query := members.get("query"), np.ndarray) and query.ndim > 1:
        taken = {name: width for name, width in widths_of_rows(layer.spec).items() if name == "key" or takes_value}
        fields |= {name: shape_alone((*query.shape[:-2], 0, width), query.dtype) for name, width in taken.items()}
        if isinstance(positions := members.get("positions"), np.ndarray):
            fields["key_positions"] = shape_alone((*query.shape[:-2], 0, *positions.shape[query.ndim - 1 :]), np.float64)
    rows = validate(AttendRequest, {"layer": layer.name, "query_offset": 0} | fields)
    if rows.batched and rows.query.shape[0] != 1:
        raise InvalidRequest.where("/query", "one sequence, with a batch axis of 1 or none", f"{rows.query.shape[0]} batch items")
    if rows.value is not None and not takes_value:
        raise InvalidRequest.where("/value", "no value, since sessions of this layer expand keys and values from the same rows", "value")
    check_against_layer(rows, layer.spec)
    return rows


def with_all_keys(members: Mapping[str, Any], rows: AttendRequest, session: Session, stop: int) -> dict[str, Any]:
    """The members of a request with all `stop` keys of the session, which have a shape, and no numbers."""
    lead = rows.query.shape[:-2]
    whole = {**members, "layer": session.layer.name, "query": rows.query}
    for name, width in widths_of_rows(session.layer.spec).items():
        whole[name] = shape_alone((*lead, stop, width))
    if rows.positions is not None:
        whole["key_positions"] = shape_alone((*lead, stop, *rows.positions.shape[1 + len(lead) :]), np.int64)
    whole.setdefault("query_offset", session.length)
    return whole


def require_rows(session: Session, call: Call) -> None:
    """Raises SessionConflict if the call needs rows that are freed."""
    if not session.cache.first:
        return
    if call.masks.positions.numel():
        session.require_visible(int(call.masks.positions.min()), "/query_offset")
    if call.options.fully_masked == "uniform" and session.layer.attention.fully_masked(call) is not None:
        expected = "zero or error, since a query without any key would average rows that the layer's window has freed"
        raise SessionConflict.where("/fully_masked", expected, "uniform")
    if call.pattern is not None:
        freed = call.pattern[..., : session.cache.first]
        if (freed if call.pattern_rows is None else freed * call.pattern_rows).any():
            expected = f"weights of 0 for the first {session.cache.first} rows, which the layer's window has freed"
            raise SessionConflict.where("/pattern", expected, "others")


def widths_of_rows(spec: LayerSpec) -> dict[str, int]:
    """The width of a key's row and of a value's."""
    return {"key": spec.key_dim, "value": spec.value_dim}
