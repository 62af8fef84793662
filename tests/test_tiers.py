"""The rules of the tiers: which package may import which, which third parties it may use, and that there are no cycles."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from attend.attention.operators import OPERATORS
from attend.attention.program import PLACES
from attend.fingerprint import FIRST_FIELDS

ROOT = Path(__file__).parent.parent / "service" / "attend"
TIER_1 = {"axes", "errors", "limits", "tensors", "spec_parts", "spec_properties", "spec", "fingerprint"}
ALLOWED: dict[str, set[str]] = {
    "axes": set(),
    "errors": set(),
    "limits": set(),
    "tensors": {"errors"},
    "spec_parts": {"errors", "tensors"},
    "spec_properties": {"axes", "errors", "tensors", "spec_parts", "attention"},  # of attention, what imports no torch (WITHOUT_TORCH)
    "spec": {"axes", "errors", "tensors", "spec_parts", "spec_properties", "attention"},
    "fingerprint": {"spec", "tensors"},
    "settings": TIER_1 | {"wire"},
    "wire": TIER_1,
    "attention": TIER_1,
    "checkpoints": TIER_1 | {"attention"},  # as spec
    "check": TIER_1 | {"attention", "checkpoints"},
    "heads": TIER_1 | {"attention"},
    "serving": TIER_1 | {"wire", "attention", "heads", "checkpoints"},
    "client": TIER_1 | {"wire", "checkpoints"},
    "web": TIER_1 | {"wire", "serving", "settings"},
    "cli": TIER_1 | {"wire", "attention", "check", "heads", "checkpoints", "serving", "client", "web", "settings"},
    "deploy": TIER_1 | {"wire", "attention", "check", "heads", "checkpoints", "serving", "client", "web", "settings", "cli"},
}
THIRD_PARTIES: dict[str, set[str]] = {
    "axes": set(),
    "errors": set(),
    "limits": set(),
    "tensors": {"ml_dtypes"},
    "spec_parts": {"pydantic", "pydantic_core"},
    "spec_properties": {"pydantic", "pydantic_core"},
    "spec": {"pydantic", "pydantic_core"},
    "fingerprint": {"pydantic"},
    "settings": {"pydantic"},
    "wire": {"pydantic", "pydantic_core", "orjson", "pybase64", "safetensors"},
    "attention": {"torch", "pydantic"},
    "check": {"torch"},
    "heads": {"torch", "matplotlib"},
    "checkpoints": {"safetensors"},
    "serving": {"torch", "asyncio", "prometheus_client", "structlog", "safetensors", "tokenizers"},
    "client": {"httpx", "asyncio", "torch", "transformers"},
    "web": {
        "fastapi",
        "starlette",
        "uvicorn",
        "httptools",
        "grpc",
        "grpc_health",
        "grpc_reflection",
        "google",
        "httpx",
        "structlog",
        "opentelemetry",
    },
}
TORCH_IN_CLIENT = ("client/remote.py", "client/transformers.py", "client/recording.py", "client/interventions.py")
NAMES_OPERATORS = (  # those who compute, read or compare single ones
    *("attention/operators/", "attention/reference/", "checkpoints/", "check/algebra/", "check/mistakes/"),
    *(f"check/{name}.py" for name in ("candidate", "cases", "changes", "convention", "fitting", "layer", "parameters")),
    *(f"check/{name}.py" for name in ("constructor", "families", "lengths", "rope_tables", "rounding", "signatures", "weights")),
    "check/further/backward.py",
)
WITHOUT_TORCH = ("operators", "program", "dataflow")  # of attention
WATCHED = {"asyncio"}  # of the standard library: the rules say which packages may use event loops
SETTINGS_READERS = {"cli", "web/app.py", "deploy"}


def imports(source: str) -> Iterator[str]:
    """The dotted names that a module imports, anywhere in the file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide the package"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_beside_types(source: str) -> set[str]:
    """The dotted names that a module imports outside of `if TYPE_CHECKING` statements."""
    statements = [node for node in ast.parse(source).body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")]
    return {name for statement in statements for name in imports(ast.unparse(statement))}


def breaches(modules: Mapping[str, str]) -> list[str]:
    """Every import that the tables do not allow; `modules` maps a path inside the package to its source."""
    found = []
    for path, source in modules.items():
        room = path.removesuffix(".py").split("/")[0]
        if room in ("__init__", "__main__", "version"):
            continue
        for name in imports(source):
            parts = name.split(".")
            if parts[0] == "attend":
                target = parts[1] if len(parts) > 1 else "__init__"
                if target not in (room, "version") and target not in ALLOWED[room]:
                    found.append(f"{path} imports {name}")
                if room in ("spec_properties", "spec", "checkpoints") and target == "attention" and parts[2] not in WITHOUT_TORCH:
                    found.append(f"{path} imports {name}")
                if target == "settings" and path not in SETTINGS_READERS and room not in SETTINGS_READERS:
                    found.append(f"{path} imports {name}")
            elif parts[0] in WATCHED or parts[0] not in sys.stdlib_module_names | {"numpy"}:
                if room in THIRD_PARTIES and parts[0] not in THIRD_PARTIES[room]:
                    found.append(f"{path} imports {name}")
                is_light = path.startswith(tuple(f"attention/{part}" for part in WITHOUT_TORCH))
                if is_light and parts[0] == "torch" and name in imports_beside_types(source):
                    found.append(f"{path} imports {name}")
                if room == "client" and parts[0] == "torch" and path not in TORCH_IN_CLIENT:
                    found.append(f"{path} imports {name}")
    return found


def cycles(modules: Mapping[str, str]) -> list[str]:
    """Files that import themselves through other files. Imports inside functions or only for type checking count too."""
    named = {"attend." + path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): source for path, source in modules.items()}
    edges = {  # an imported name stands for its file
        name: {target if target in named else target.rpartition(".")[0] for target in imports(source)} & named.keys()
        for name, source in named.items()
    }

    def reachable(start: str) -> set[str]:
        found, left = set[str](), list(edges[start])
        while left:
            if (name := left.pop()) not in found:
                found.add(name)
                left += edges[name]
        return found

    return [name for name in edges if name in reachable(name)]


def package() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.rglob("*.py")}


def test_no_module_imports_upward_or_sideways() -> None:
    """For example, wire does not import torch, attention no request schema, and serving no HTTP library."""
    assert breaches(package()) == []


def test_there_are_no_import_cycles() -> None:
    assert cycles(package()) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("wire/json/reader.py", "import torch"),
        ("wire/json/reader.py", "from attend.attention.layer import MultiHeadAttention"),
        ("attention/layer.py", "from attend.wire.schemas.attend import AttendRequest"),
        ("attention/layer.py", "from attend.heads.metrics.rows import MetricsOptions"),
        ("heads/metrics/compute.py", "from attend.check.cases import Case"),
        ("attention/layer.py", "import asyncio"),
        ("attention/operators/rope.py", "import torch"),
        ("spec.py", "from attend.attention.layer import MultiHeadAttention"),
        ("serving/engine.py", "def late():\n    from fastapi import Request"),
        ("serving/engine.py", "from attend.settings import Settings"),
        ("web/routes/attend.py", "from attend.settings import Settings"),
        ("client/client.py", "import torch"),
        ("errors.py", "from attend import spec"),
    ],
)
def test_a_forbidden_import_is_found(path: str, source: str) -> None:
    """Each case breaks one rule."""
    assert breaches({path: source})


@pytest.mark.parametrize(
    "modules",
    [
        {"a/x.py": "import attend.a.y", "a/y.py": "import attend.a.x"},
        {"a/x.py": "from attend.a.y import f", "a/y.py": "from attend.b import z", "b/z.py": "def f():\n    from attend.a.x import g"},
        {"a/x.py": "if TYPE_CHECKING:\n    from attend.a.y import T", "a/y.py": "from attend.a import x"},
        {"a/__init__.py": "from attend.a.x import f", "a/x.py": "from attend.a import g"},
    ],
    ids=["two", "three, in a function", "for type checking", "a package and its file"],
)
def test_a_cycle_is_found(modules: dict[str, str]) -> None:
    assert cycles(modules)


def test_a_client_loads_neither_torch_nor_fastapi() -> None:
    """Importing the client must stay light, whatever is installed."""
    code = "import sys, attend.client; print([m for m in ('torch', 'fastapi', 'typer', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


CHECK = """
import sys

class OfExtras:
    def find_spec(name, path=None, target=None):
        if name in ("torch", "fastapi", "starlette", "uvicorn", "typer", "rich", "structlog", "matplotlib", "prometheus_client", "grpc"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, OfExtras)
import numpy as np
from attend.check import assert_agrees, compare

def attend(query, key, value, mask=None, scale=None):
    scores = query @ key.swapaxes(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if mask is None else np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value

assert_agrees(lambda query, key, value, mask=None, scale=None: attend(query, key, value, mask, scale), longest=17)
assert_agrees(lambda q, k, v: attend(q, k.repeat(2, 1), v.repeat(2, 1)), like="sdpa", spec="llama", longest=17, allow_skipped=True)
print(compare(lambda query, key, value: attend(query, key, value, scale=1.0), longest=7))
"""


def test_attend_check_runs_from_the_base_install() -> None:
    """With NumPy, where what the extras install is missing."""
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "this is what comes out when the scores are not divided by sqrt(head_dim)" in " ".join(done.stdout.split())


def test_no_other_file_asks_for_an_operator_by_name() -> None:
    """A file that needs something of an operator lets the operator declare it.

    Strings may be names of places of the program or of fields of requests. Requests may have a softcap in place of
    the layer's. Random requests draw windows as random layers do, and no blocks that depend on rounding.
    """
    fields, files = {operator.field for operator in OPERATORS}, {operator.name for operator in OPERATORS}
    strings = {operator.field for operator in OPERATORS if not operator.of_calls} - {*PLACES}
    found = set()
    for path in ROOT.rglob("*.py"):
        file = path.relative_to(ROOT).as_posix()
        for node in () if file.startswith(NAMES_OPERATORS) else ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Attribute(value=ast.Name(id="spec") | ast.Attribute(attr="spec"), attr=name) if name in fields:
                    found.add((file, name))
                case ast.Constant(value=str(name)) if name in strings:
                    found.add((file, name))
                case ast.ImportFrom(module=str(module)) if module.startswith("attend.attention.operators."):
                    found |= {(file, module.rpartition(".")[2])} if module.rpartition(".")[2] in files else set()
    first = FIRST_FIELDS[""] & strings  # those of the first version, to which fingerprints refer
    words = ("serving/words/small.py", "rope")  # the spec of a model
    calls = {("serving/calls.py", "softcap"), ("check/random_cases.py", "window"), ("check/random_cases.py", "block_selection")}
    assert found == {*calls, words, *(("fingerprint.py", name) for name in first)}
