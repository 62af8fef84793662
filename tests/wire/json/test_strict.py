"""The strict parser imports nothing when it is first used: a server without free file handles could not."""

import subprocess
import sys

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
