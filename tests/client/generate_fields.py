"""Writes `service/attend/client/fields.py` from the schemas of the requests: `python tests/client/generate_fields.py`."""

from collections.abc import Collection
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from attend.axes import TENSOR_FIELDS
from attend.wire.schemas.analysis import REFUSED_FIELDS, AnalysisRequest, Metric
from attend.wire.schemas.attend import AttendRequest
from attend.wire.schemas.figure import Figure, FigureRequest
from attend.wire.schemas.sessions import SessionAttendRequest

FILE = Path(__file__).parents[2] / "service" / "attend" / "client" / "fields.py"
PARAMETERS = {"layer", "query", "key", "value", "metrics", "figure"}  # that operations have besides these fields
ALIASES: dict[Any, str] = {Metric: "str"}
ALSO_ARRAYS = {"query_offset"}  # lists in the schema, of which its validator makes arrays lists
HEADER = '''"""Types of the fields of requests, besides those that operations have as parameters of their own. None leaves a field out.

`tests/client/generate_fields.py` writes this file from the models of `wire/schemas/`; `help(Client.attend)` shows their descriptions.
"""

from collections.abc import Sequence
from typing import Literal, Required, TypedDict

from attend.client.arguments import TensorLike
'''


def write() -> str:
    """The text of the file."""
    names = {Figure: "FigureOptions"}  # models that fields refer to, with the names of their dictionaries
    attend, analysis = AttendRequest.model_fields.keys(), AnalysisRequest.model_fields.keys()
    calls = [
        _call(*of_call, names)
        for of_call in (  # name, bases, operations, schema, fields of the schema that the bases have, or that are refused
            ("CallFields", "TypedDict", "every operation that computes attention", AttendRequest, REFUSED_FIELDS),
            ("AttendFields", "CallFields", "`attend`", AttendRequest, attend - REFUSED_FIELDS),
            ("StepFields", "AttendFields", "a session's `attend`", SessionAttendRequest, attend),
            ("AnalysisFields", "CallFields", "`analysis`", AnalysisRequest, attend),
            ("FigureFields", "AttendFields", "`figure`", FigureRequest, attend),
            ("PlanFields", "AttendFields, AnalysisFields", "`plan`", AnalysisRequest, analysis),
        )
    ]
    return "\n\n".join([HEADER, *(_options(model, name) for model, name in names.items()), *calls])


def _call(name: str, bases: str, operations: str, model: type[BaseModel], without: Collection[str], names: dict[Any, str]) -> str:
    lines = [f"class {name}({bases}, total=False):", f'    """The fields of {operations}."""', ""]
    for field in model.model_fields:
        if field not in without and field not in PARAMETERS:
            written = _type(model, field, names)
            axes = f"  # {TENSOR_FIELDS[field]}" if field in TENSOR_FIELDS else ""
            lines.append(f"    {field}: {written if written.endswith('| None') else f'{written} | None'}{axes}")
    return "\n".join(lines).rstrip() + "\n"


def _options(model: type[BaseModel], name: str) -> str:
    lines = [f"class {name}(TypedDict, total=False):", f'    """{model.__doc__}"""', ""]
    for field, about in model.model_fields.items():
        if (model, field) not in ((Figure, "kind"), (Figure, "format")):  # which are parameters
            written = _type(model, field, {})
            lines.append(f"    {field}: {f'Required[{written}]' if about.is_required() else written}")
    return "\n".join(lines) + "\n"


def _type(model: Any, field: str, names: dict[Any, str]) -> str:
    if field in getattr(model, "tensor_kinds", ()):
        return "TensorLike | None"
    written = _written(model.model_fields[field].annotation, names)
    return written.replace(" | None", " | TensorLike | None") if field in ALSO_ARRAYS else written


def _written(annotation: Any, names: dict[Any, str]) -> str:
    """A type as an annotation. Adds its models to `names`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation in ALIASES:
        return ALIASES[annotation]
    if origin is Annotated:
        return _written(inner[0], names)
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(_written(item, names) for item in inner))
    if origin is list:
        return f"Sequence[{_written(inner[0], names)}]"
    if origin is Literal:
        values = ", ".join(f'"{value}"' for value in inner)
        return f"Literal[{values}]"
    if annotation is NoneType:
        return "None"
    if issubclass(annotation, BaseModel):
        return names.setdefault(annotation, annotation.__name__)
    return str(annotation.__name__)


if __name__ == "__main__":
    FILE.write_text(write())
