"""The JSON schemas of tensors in requests, and of all models, for the OpenAPI document."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from service.tensors import DATATYPES
from service.wire.arrays import Kind

MAX_COUNT = 2**53
MAX_AXIS = 2**31 - 1
NAME_KEY = "x-name"  # in a JSON schema: title and description of the definition that it becomes
ITEMS: dict[Kind, dict[str, Any]] = {
    "number": {"type": "number"},
    "bias": {
        "anyOf": [{"type": "number"}, {"type": "string", "enum": ["-inf"]}],
        NAME_KEY: {"title": "BiasElement", "description": 'A number that is added to a score. "-inf" blocks the pair of query and key.'},
    },
    "mask": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 1}, {"type": "boolean"}]},
    "count": {"type": "integer", "minimum": 0, "maximum": MAX_COUNT - 1},
    "segment": {"type": "integer", "minimum": -1, "maximum": MAX_COUNT - 1},
}
DESCRIPTIONS: dict[Kind, str] = {
    "number": "numbers",
    "bias": 'numbers or "-inf"',
    "mask": "0, 1, true or false",
    "count": "whole numbers",
    "segment": "numbers of segments, -1 for padding",
}
REFERENCE = "#/components/schemas/{model}"  # where the OpenAPI document has a definition
NULL = {"type": "null"}


def tensor_schema(name: str, kind: Kind, ranks: tuple[int, ...]) -> dict[str, Any]:
    """The JSON schema of a tensor of a request: nested lists, shape and data, or shape and base64."""
    lists = [_nested_lists(kind, rank) for rank in ranks]
    axes: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_AXIS}}
    axes |= {"minItems": min(ranks), "maxItems": max(ranks), "description": "Lengths of the axes. 0 is allowed."}
    names = [datatype.name for datatype in DATATYPES.values() if datatype.kind != "bool"]
    about = {"title": "Datatype", "description": "Datatype of numbers, by its name in the Open Inference Protocol."}
    datatype: dict[str, Any] = {"type": "string", "enum": names, NAME_KEY: about}
    if kind == "mask":
        datatype = {"anyOf": [datatype, {"type": "string", "enum": ["BOOL"]}]}
    flat = {"type": "array", "items": ITEMS[kind]}
    data: dict[str, Any] = {"anyOf": [flat, *(nested for nested, rank in zip(lists, ranks, strict=True) if rank > 1), NULL]}
    data["description"] = "Row-major values, in one list or nested to the shape; optional only for POST /attend/plan."
    text = {"type": "string", "contentEncoding": "base64", "description": "Little-endian bytes of the row-major values."}
    numbers = _object_schema({"shape": axes, "datatype": {"anyOf": [datatype, NULL]}, "data": data}, "shape")
    numbers[NAME_KEY] = {"title": f"Flat{name}", "description": "A shape, and values in row-major order."}
    bytes_ = _object_schema({"shape": axes, "datatype": datatype, "base64": text}, "shape", "datatype", "base64")
    bytes_[NAME_KEY] = {"title": f"Base64{name}", "description": "A shape, and the base64 of the values' bytes."}
    about_tensor = {"title": name, "description": f"Rank {' or '.join(map(str, ranks))}, of {DESCRIPTIONS[kind]}."}
    return {"anyOf": [*lists, numbers, bytes_], NAME_KEY: about_tensor}


def _nested_lists(kind: Kind, rank: int) -> dict[str, Any]:
    """The schema of nested lists of that rank. An empty list is not allowed, since its shape is unknown."""
    return ITEMS[kind] if not rank else {"type": "array", "items": _nested_lists(kind, rank - 1), "minItems": 1}


def _object_schema(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def json_schemas(models: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """Name -> JSON schema of the models, and of each type of tensor, which the others reference."""
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=REFERENCE)
    found: dict[str, Any] = {}

    def with_references(node: Any) -> Any:
        if isinstance(node, list):
            return [with_references(item) for item in node]
        if not isinstance(node, dict):
            return node
        if NAME_KEY not in node:
            return {key: with_references(value) for key, value in node.items()}
        name = node[NAME_KEY]["title"]
        schema = {key: with_references(value) for key, value in node.items() if key not in (NAME_KEY, "description")}
        found[name] = {**node[NAME_KEY], **schema}
        description = {"description": node["description"]} if "description" in node else {}
        return {"$ref": REFERENCE.format(model=name), **description}

    return {**with_references(schemas["$defs"]), **found}
