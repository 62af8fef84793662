"""An integer may be written as 16.0 in every form of a request, since JSON Schema calls that an integer. Nothing else becomes one."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from attend.spec import LayerSpec
from attend.spec_parts import whole
from attend.wire.schemas.analysis import AnalysisOptions
from attend.wire.schemas.attend import Dropout, ReplyOptions, Select
from attend.wire.schemas.figure import Figure
from attend.wire.schemas.sessions import PostSession
from attend.wire.v2.members import PROTOCOL_PARAMETERS
from attend.wire.v2.schemas import CodecParameters, InferenceParameters, InputParameters

COUNT = st.integers(1, 2**31 - 1)
DOCUMENTS = {  # model -> documents whose numbers are all integers
    LayerSpec: st.fixed_dictionaries(
        {"d_model": st.sampled_from([8, 24, 56]), "num_heads": st.sampled_from([1, 2, 4]), "seed": st.integers(0, 2**32 - 1)},
        optional={
            "num_kv_heads": st.just(1),
            "rope": st.just({"dims": 2}),
            "window": st.just({"left": 3, "right": 5}),
        },
    ),
    Select: st.fixed_dictionaries({"heads": st.lists(COUNT, min_size=1, unique=True), "queries": st.just([0]), "top_k": COUNT}),
    Dropout: st.fixed_dictionaries({"p": st.just(0), "seed": st.integers(0, 2**32 - 1)}),
    ReplyOptions: st.fixed_dictionaries({"decimals": st.integers(0, 17)}),
    AnalysisOptions: st.fixed_dictionaries({"local_window": COUNT, "top_links": st.integers(1, 1000)}),
    Figure: st.fixed_dictionaries({"dpi": st.integers(48, 384), "width": st.integers(200, 4096)}),
    PostSession: st.fixed_dictionaries({"capacity": COUNT, "idle_seconds": st.integers(1, 60)}),
    InferenceParameters: st.fixed_dictionaries({"timeout": COUNT, "priority": COUNT, "sequence_id": COUNT}),
    InputParameters: st.fixed_dictionaries({"binary_data_size": COUNT}),
}


def with_each_number(document: Any, change: Callable[[int], Any]) -> Any:
    """The document with every number changed."""
    if isinstance(document, dict):
        return {name: with_each_number(value, change) for name, value in document.items()}
    if isinstance(document, list):
        return [with_each_number(item, change) for item in document]
    return change(document)


@given(st.data())
@pytest.mark.parametrize("model", DOCUMENTS, ids=lambda model: model.__name__)
def test_whole_floats_are_integers(model: type[BaseModel], data: st.DataObject) -> None:
    document = data.draw(DOCUMENTS[model])

    assert model.model_validate(with_each_number(document, float)) == model.model_validate(document)


@given(st.data())
@pytest.mark.parametrize("model", DOCUMENTS, ids=lambda model: model.__name__)
@pytest.mark.parametrize("change", [str, lambda n: n + 0.5, lambda n: bool(n % 2)], ids=["text", "fraction", "boolean"])
def test_texts_fractions_and_booleans_are_no_integers(model: type[BaseModel], change: Callable[[int], Any], data: st.DataObject) -> None:
    document = data.draw(DOCUMENTS[model])

    with pytest.raises(ValidationError):
        model.model_validate(with_each_number(document, change))


def test_a_float_beyond_exact_integers_stays_one() -> None:
    assert [type(whole(number)) for number in (2.0**53, -(2.0**53), 2.0**54, float("inf"), float("nan"), 0.5)] == [int, int, *[float] * 4]
    assert whole(True) is True and whole("16.0") == "16.0"


@pytest.mark.parametrize("number", [int, float])
def test_replies_are_the_same(http: httpx.Client, number: Callable[[int], Any]) -> None:
    """Over HTTP, in the fields of `/attend`, in the shape of a tensor, in the spec of a layer, and in the Open Inference Protocol."""
    query = [[0.5, -1.0, 2.0, 0.25], [1.5, 0.0, -0.5, 1.0]]
    spec = {"d_model": number(4), "num_heads": number(2), "seed": number(5)}
    assert http.put("/layers/whole", json={"spec": spec}).is_success
    options: dict[str, Any] = {"query_offset": number(1), "window": {"left": number(1), "right": number(0)}}
    select = {"heads": [number(1)], "queries": [number(1)]}
    tensor = {"shape": [number(2), number(4)], "datatype": "FP32", "data": [n for row in query for n in row]}
    replies = [
        http.post("/attend", json={"layer": "whole", "query": form, **options, "select": select, "reply": {"decimals": number(3)}})
        for form in (query, tensor)
    ]
    assert [reply.json()["attention_weights"] for reply in replies] == [replies[0].json()["attention_weights"]] * 2
    texts = {"window": json.dumps(options["window"]), "select": json.dumps(select)}
    parameters = {"query_offset": number(1), "timeout": number(10**8), **texts}
    inputs = [{"name": "query", **tensor, "shape": [number(1), *tensor["shape"]]}]
    v2 = http.post("/v2/models/whole/infer", json={"inputs": inputs, "parameters": parameters, "outputs": [{"name": "attention_weights"}]})
    expected = http.post("/attend", json={"layer": "whole", "query": query, "query_offset": 1, "window": {"left": 1, "right": 0}}).json()
    assert v2.json()["outputs"][0]["data"] == expected["attention_weights"][1][1]
    assert http.delete("/layers/whole").status_code == 204


def test_the_listed_parameters_of_the_protocol_are_those_of_its_schema() -> None:
    assert set(PROTOCOL_PARAMETERS) == InferenceParameters.model_fields.keys() - CodecParameters.model_fields.keys()
