"""Turns an operation into a method of a client or a session: adds signature and description, and explains misnamed arguments."""

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast, get_args

from attend.client.api_request import ApiRequest
from attend.client.operations import put_layer
from attend.errors import InvalidRequest, pointer
from attend.wire.problems import unknown_field
from attend.wire.schemas.analysis import AnalysisRequest
from attend.wire.schemas.attend import AttendRequest
from attend.wire.schemas.layers import PutLayer
from attend.wire.schemas.sessions import StepOptions

FIELDS = AnalysisRequest.model_fields | StepOptions.model_fields
DESCRIPTIONS = {name: field.description or inspect.getdoc(field.annotation) for name, field in FIELDS.items()}
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")


def make_request(operation: Callable[P, ApiRequest[T]], *args: P.args, **kwargs: P.kwargs) -> ApiRequest[T]:
    """The request of an operation. Raises InvalidRequest, not TypeError, for arguments under their names in another library."""
    try:
        return operation(*args, **kwargs)
    except TypeError:
        model = PutLayer if operation is put_layer else AttendRequest
        if problems := [unknown_field(pointer([name]), name, model) for name in kwargs if name in model.expected_instead]:
            raise InvalidRequest(problems=problems) from None
        raise


def signed(method: F) -> F:
    """The method with the signature that `help` and notebooks show: `self`, the operation's parameters, each field of its `Unpack`ed
    dictionary, and the type of the result. The fields are described below the docstring."""
    signature = inspect.signature(method)
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            fields = get_args(parameter.annotation)[0].__annotations__
            parameters += [inspect.Parameter(name, parameter.KEYWORD_ONLY, default=None, annotation=kind) for name, kind in fields.items()]
            described = [f"{name}: {DESCRIPTIONS[name]}" for name in fields]
            method.__doc__ = "\n".join([inspect.cleandoc(method.__doc__ or ""), "", *described])
        elif parameter.name != "session":  # which is `self` of the methods of a session
            parameters.append(parameter)
    result = get_args(signature.return_annotation)[0]
    cast(Any, method).__signature__ = signature.replace(parameters=parameters, return_annotation=result)  # typeshed lacks the attribute
    return method
