"""Suggestions for unknown names: the closest name, and the fields that correspond to names of other libraries."""

import re

import pytest

from attend.errors import COMPARED, InvalidRequest, did_you_mean
from attend.spec import LayerSpec
from attend.wire.problems import validate
from attend.wire.schemas.analysis import AnalysisRequest
from attend.wire.schemas.attend import ADVICE, OTHER_NAMES, AttendRequest
from attend.wire.schemas.figure import FigureRequest
from attend.wire.schemas.layers import PutLayer

FIELDS = {*AttendRequest.model_fields, *AnalysisRequest.model_fields, *FigureRequest.model_fields}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_a_request_field_is_suggested_for_a_name_of_another_library(name: str) -> None:
    assert name not in FIELDS
    assert re.match("|".join(FIELDS), OTHER_NAMES[name])


@pytest.mark.parametrize(("name", "meaning"), LayerSpec.expected_instead.items())
def test_a_spec_field_is_suggested_for_a_name_of_another_library(name: str, meaning: str) -> None:
    assert name not in LayerSpec.model_fields
    assert meaning.partition(" ")[0] in {*LayerSpec.model_fields, "no"}
    with pytest.raises(InvalidRequest, match=re.escape(f'expected {meaning}, got a field "{name}", at /spec/{name}')):
        validate(PutLayer, {"spec": {"d_model": 4, "num_heads": 2, name: 1}})


def test_each_name_of_another_library_has_one_suggestion() -> None:
    names = " ".join(ADVICE.values()).split()
    assert sorted(names) == sorted(OTHER_NAMES)


def test_the_closest_name_is_suggested() -> None:
    known = ["causal", "query", "query_offset"]
    assert did_you_mean("querry", known) == " (did you mean query?)"
    assert did_you_mean("query_ofset", known) == " (did you mean query_offset?)"
    assert did_you_mean("xyz", known) == did_you_mean(5, known) == did_you_mean("q", []) == ""


def test_a_bounded_number_of_names_is_compared() -> None:
    """A server may have a thousand layers, and a name any length. Names with the same beginning come first."""
    assert did_you_mean("layer", [*("xlayer" for _ in range(COMPARED)), "slayer"]) == " (did you mean xlayer?)"
    assert did_you_mean("layer", [*("xxlayer" for _ in range(COMPARED)), "layers"]) == " (did you mean layers?)"
    assert did_you_mean("layer" + "x" * 10**6, ["layer"]) == ""
