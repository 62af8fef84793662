"""The strict parser: the bound on values, which are counted before any is made; and what it imports.

It imports nothing when it is first used: a server without free file handles could not."""

import json
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attend.errors import TooLarge
from attend.limits import WireLimits
from attend.wire.json import strict
from attend.wire.json.strict import parse_strictly

CODE = """
import sys
from attend.wire.json.strict import parse_strictly
before = set(sys.modules)
assert parse_strictly(b'\\xef\\xbb\\xbf{"a": [1e2, "\\xc3\\xa9"]}') == {"a": [100.0, "\\u00e9"]}
assert parse_strictly(b'{"a": 1}') == {"a": 1}
print(set(sys.modules) - before)
"""


def test_the_first_document_imports_no_module() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def values_in(document: Any) -> int:
    """All values of a document, itself included."""
    items = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    return 1 + sum(map(values_in, items))


def depth_of(document: Any) -> int:
    """How many lists and objects a value stands in, at most, and one."""
    items = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    return 1 + max(map(depth_of, items), default=0)


TEXTS = st.text('[]{},"\\\\:a \n\u00e9', max_size=9)
DOCUMENTS = st.recursive(
    st.none() | st.integers() | TEXTS, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5), max_leaves=30
)


@pytest.mark.parametrize("piece", [2, 7, 1 << 17])
@given(document=DOCUMENTS, indent=st.sampled_from([None, 1]), ascii=st.booleans())
def test_values_and_depth_are_those_of_the_document(document: Any, indent: int | None, ascii: bool, piece: int) -> None:
    """Whatever its strings have, wherever a piece of the text ends, and with any white space. Its outermost value does not count."""
    text = json.dumps(document, indent=indent, ensure_ascii=ascii).encode()
    values, depth = values_in(document) - 1, depth_of(document)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strict, "PIECE_BYTES", piece)
        assert parse_strictly(text, limits=WireLimits(values=values, max_depth=depth + 1)) == document
        for limits in [WireLimits(values=values - 1), WireLimits(max_depth=depth - 1)] if values > 0 else []:
            with pytest.raises(TooLarge):
                parse_strictly(text, limits=limits)


@pytest.mark.parametrize(("limits", "allowed"), [(WireLimits(values=3), True), (WireLimits(values=2), False)])
def test_replaced_values_do_not_count(limits: WireLimits, allowed: bool) -> None:
    with nullcontext() if allowed else pytest.raises(TooLarge):
        assert parse_strictly(b"[1, NaN, [NaN, 2]]", replacements=["a", "b"], limits=limits) == [1, "a", ["b", 2]]
