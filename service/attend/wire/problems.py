"""Converts pydantic's errors to `Problem`s: where, what was expected, what was received (shortened), which known name may be meant."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import numpy as np
from pydantic import BaseModel, ValidationError, create_model

from attend.errors import InvalidRequest, Problem, did_you_mean, pointer

Model = TypeVar("Model", bound=BaseModel)
MAX_SHOWN = 60  # characters of a received value in a message
MAX_PROBLEMS = 16  # of one refusal
HALF_SURROGATE = "half of a surrogate pair"

EXPECTED = {
    "missing": "this required field",
    "dict_type": "an object",
    "list_type": "a list",
    "string_type": "a string",
    "string_unicode": "a string of Unicode text",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "finite_number": "a finite number",
    "int_parsing": "an integer",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
}
EXPECTED_BOUND = {"greater_than": "more than", "greater_than_equal": "at least", "less_than": "less than", "less_than_equal": "at most"}
EXPECTED_WITH_LIMIT = {
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "string_pattern_mismatch": "a text matching {pattern}",
    "string_too_short": "a text of at least {min_length} characters",
    "string_too_long": "a text of at most {max_length} characters",
    "int_parsing_size": "an integer of fewer digits",
}


def validate(model: type[Model], document: Any, at: str = "", context: Any = None) -> Model:
    """The document as a `model`, whose validators get `context`. Raises InvalidRequest with pydantic's errors, as pointers below `at`."""
    try:
        return model.model_validate(document, context=context)
    except ValidationError as refusal:
        problems = [_problem_of(error, at, model) for error in refusal.errors(include_url=False)[:MAX_PROBLEMS]]
    raise InvalidRequest(problems=problems)


def model_of_parameters(kinds: Mapping[str, tuple[Any, Any]]) -> type[BaseModel]:
    """The model of parameters of these types and defaults; a default of `...` makes a parameter required."""
    fields: dict[str, Any] = dict(kinds)
    return create_model("Parameters", **fields)


def validate_parameters(model: type[BaseModel], texts: Mapping[str, str], sources: Mapping[str, str]) -> dict[str, Any]:
    """The values of parameters that are given as text. `sources` says of each whether it is of the path or of the query.

    Raises InvalidRequest. Its problems name the parameters and have no pointers, which would be into the body."""
    try:
        return dict(model.model_validate(texts))
    except ValidationError as refusal:
        problems = [_problem_of_parameter(error, sources) for error in refusal.errors(include_url=False)[:MAX_PROBLEMS]]
    raise InvalidRequest(problems=problems)


def _problem_of_parameter(error: Any, sources: Mapping[str, str]) -> Problem:
    name = error["loc"][0]
    parameter = f"the {sources[name]} parameter {name}"
    if error["type"] == "missing":
        return Problem("", parameter, "nothing")
    problem = _problem_of(error, "", BaseModel)
    return Problem("", f"{problem.expected} as {parameter}", problem.got)


def _problem_of(error: Any, at: str, model: type[BaseModel]) -> Problem:
    """The problem of one of pydantic's errors, in the validation of a document of `model` at the pointer `at`."""
    place, error_type, context = at + pointer(error["loc"]), error["type"], error.get("ctx", {})
    value = error.get("input")
    got = describe_value(value)
    if error_type == "field_error":
        return Problem(place + context["at"], context["expected"], context["got"])
    if error_type == "string_unicode":
        return Problem(place, EXPECTED[error_type], HALF_SURROGATE)
    if error_type in ("missing", "model_type", "model_attributes_type"):
        inner = _model_at(model, error["loc"])
        if error_type == "missing":
            return Problem(place, _expected_object(inner) if inner.model_fields else EXPECTED[error_type], "nothing")
        return Problem(place, _expected_object(inner), got)
    if error_type == "extra_forbidden":
        return unknown_field(place, str(error["loc"][-1]), _model_at(model, error["loc"][:-1]))
    if error_type in ("literal_error", "enum"):
        names = re.findall("'(.*?)'", context["expected"])
        return Problem(place, one_of(f'"{name}"' for name in names), got + did_you_mean(value, names))
    if error_type in EXPECTED_WITH_LIMIT:
        return Problem(place, EXPECTED_WITH_LIMIT[error_type].format_map(context), got)
    if error_type in EXPECTED_BOUND:
        ((_, bound),) = context.items()
        return Problem(place, f"{EXPECTED_BOUND[error_type]} {bound if isinstance(bound, int) else format(bound, 'g')}", got)
    message = error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return Problem(place, EXPECTED.get(error_type, message[:1].lower() + message[1:]), got)


def _model_at(model: type[BaseModel], path: Sequence[int | str]) -> type[BaseModel]:
    """The model of the document at this path below a document of `model`; one without fields if that has no model of its own."""
    types: Sequence[Any] = [model]
    for name in path:
        if isinstance(name, int):
            types = [item for kind in types if get_origin(kind) is list for item in get_args(kind)]
        else:
            fields = [kind.model_fields[name] for kind in types if _is_model(kind) and name in kind.model_fields]
            types = [x for field in fields for x in (field.annotation, *_members_of_union(field.annotation))]
    return next(filter(_is_model, types), BaseModel)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _members_of_union(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else ()


def _expected_object(model: type[BaseModel]) -> str:
    """The expectation of a document of `model`, with its fields that have an example."""
    example = {name: field.examples[0] for name, field in model.model_fields.items() if field.examples}
    return f"an object such as {json.dumps(example)}" if example else "an object"


def unknown_field(at: str, name: str, model: type[BaseModel]) -> Problem:
    """The problem of a field that `model` does not have, with what to write instead, or the field that is most like it."""
    expected_instead: Mapping[str, str] = getattr(model, "expected_instead", {})
    got = f"a field {describe_value(name[:MAX_SHOWN])}"
    if name in expected_instead:
        return Problem(at, expected_instead[name], got)
    return Problem(at, "no field of that name", got + did_you_mean(name, model.model_fields))


def one_of(names: Iterable[str]) -> str:
    """The expectation of one of these names, in alphabetical order; "none" if there are none."""
    every = sorted(names)
    return f"one of {', '.join(every)}" if every else "none"


def describe_value(value: Any) -> str:
    """A short description of a received value, in terms of JSON."""
    if isinstance(value, np.ndarray):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = f'"{repr(str(value))[1:-1]}"' if isinstance(value, str) else str(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def is_unicode(text: str) -> bool:
    """Whether the text can be encoded as UTF-8. JSON can escape half of a surrogate pair, which UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
