"""The generators' option `--check` finds every difference between the file and a new run."""

import copy
import json

import numpy as np
import pytest

from golden import casefile


def document():
    request = {"query": casefile.draw(1, 2, 3, 5), "causal": True, "attend_keys": [[1, 1, 0], [1, 1, 1]]}
    cases = [casefile.case("a call", {"spec": {"num_heads": 5}}, request, casefile.draw(2, 2, 3, 5), casefile.draw(3, 2, 5, 3, 3))]
    return {"weights": {"W_q": casefile.tensor(casefile.draw(4, 5, 5))}, "cases": cases}


def nudged(tensor, by):
    return casefile.tensor(casefile.array(tensor) + np.float32(by))


CHANGES = {
    "other weights": lambda d: d["weights"].update(W_q=nudged(d["weights"]["W_q"], 1e-6)),
    "one weight more": lambda d: d["weights"].update(W_k=d["weights"]["W_q"]),
    "another spec": lambda d: d["cases"][0]["load"]["spec"].update(num_heads=1),
    "one case less": lambda d: d["cases"].clear(),
    "another query": lambda d: d["cases"][0]["request"].update(query=casefile.tensor(casefile.draw(5, 2, 3, 5))),
    "another shape": lambda d: d["cases"][0]["request"].update(query=casefile.tensor(casefile.draw(1, 3, 2, 5))),
    "no mask": lambda d: d["cases"][0]["request"].pop("attend_keys"),
    "a field more": lambda d: d["cases"][0]["request"].update(scale=1.0),
    "other output": lambda d: d["cases"][0]["expect"].update(output=nudged(d["cases"][0]["expect"]["output"], 2e-5)),
    "no weights shown": lambda d: d["cases"][0]["expect"].pop("attention_weights"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_difference_is_found(change):
    before, after = document(), copy.deepcopy(document())
    change(after)
    assert list(casefile.compare(before, after)) and list(casefile.compare(after, before))


def test_differences_below_the_tolerance_are_ignored():
    """The tolerance applies to expected outputs, and is that of the file on disk."""
    before, after = document(), document()
    after["cases"][0]["expect"]["output"] = nudged(after["cases"][0]["expect"]["output"], 2e-6)
    assert list(casefile.compare(json.loads(json.dumps(before)), after)) == []
