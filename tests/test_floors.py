"""The rules of the floors: which package may import which, which third parties it may use, and that there are no cycles."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "service"
FLOOR_1 = {"errors", "tensors", "spec_parts", "spec"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "tensors": {"errors"},
    "spec_parts": {"errors", "tensors"},
    "spec": {"errors", "tensors", "spec_parts"},
    "settings": FLOOR_1 | {"wire"},
    "wire": FLOOR_1,
    "attention": FLOOR_1,
    "checkpoints": FLOOR_1,
    "serving": FLOOR_1 | {"wire", "attention", "checkpoints"},
    "client": FLOOR_1 | {"wire", "checkpoints"},
    "web": FLOOR_1 | {"wire", "serving", "settings"},
    "cli": FLOOR_1 | {"wire", "attention", "checkpoints", "serving", "client", "web", "settings"},
    "deploy": FLOOR_1 | {"wire", "attention", "checkpoints", "serving", "client", "web", "settings", "cli"},
}
THIRD_PARTIES: dict[str, set[str]] = {
    "errors": set(),
    "tensors": {"ml_dtypes"},
    "spec_parts": {"pydantic", "pydantic_core"},
    "spec": {"pydantic", "pydantic_core"},
    "settings": {"pydantic"},
    "wire": {"pydantic", "pydantic_core", "orjson", "pybase64", "safetensors"},
    "attention": {"torch", "safetensors", "matplotlib"},
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
WATCHED = {"asyncio"}  # of the standard library: the rules say which packages may use event loops
ABOVE_ATTENTION = ("metrics", "figures", "compare")  # folders of attention; each may import the earlier ones, the core none
SETTINGS_READERS = {"cli", "web/app.py", "deploy"}


def imports(source: str) -> Iterator[str]:
    """The dotted names that a module imports, anywhere in the file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide the package"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _level(folder: str) -> int:
    """The level of a folder of attention; the core is 0."""
    return ABOVE_ATTENTION.index(folder) + 1 if folder in ABOVE_ATTENTION else 0


def breaches(modules: Mapping[str, str]) -> list[str]:
    """Every import that the tables do not allow; `modules` maps a path inside the package to its source."""
    found = []
    for path, source in modules.items():
        room = path.removesuffix(".py").split("/")[0]
        if room in ("__init__", "__main__"):
            continue
        for name in imports(source):
            parts = name.split(".")
            if parts[0] == "service":
                target = parts[1] if len(parts) > 1 else "__init__"
                if target not in (room, "__version__") and target not in ALLOWED[room]:
                    found.append(f"{path} imports {name}")
                if room == target == "attention" and _level(parts[2]) > _level(path.split("/")[1]):
                    found.append(f"{path} imports {name}")
                if target == "settings" and path not in SETTINGS_READERS and room not in SETTINGS_READERS:
                    found.append(f"{path} imports {name}")
            elif parts[0] in WATCHED or parts[0] not in sys.stdlib_module_names | {"numpy"}:
                if room in THIRD_PARTIES and parts[0] not in THIRD_PARTIES[room]:
                    found.append(f"{path} imports {name}")
                if room == "client" and parts[0] == "torch" and path not in ("client/remote.py", "client/transformers.py"):
                    found.append(f"{path} imports {name}")
    return found


def cycles(modules: Mapping[str, str]) -> list[str]:
    """Files that import themselves through other files. Imports inside functions or only for type checking count too."""
    named = {"service." + path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): source for path, source in modules.items()}
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
        ("wire/json/reader.py", "from service.attention.layer import MultiHeadAttention"),
        ("attention/layer.py", "from service.wire.schemas.attend import AttendRequest"),
        ("attention/layer.py", "from service.attention.metrics.rows import MetricsOptions"),
        ("attention/metrics/compute.py", "from service.attention.figures.kinds import Pooling"),
        ("attention/layer.py", "import asyncio"),
        ("serving/engine.py", "def late():\n    from fastapi import Request"),
        ("serving/engine.py", "from service.settings import Settings"),
        ("web/routes/attend.py", "from service.settings import Settings"),
        ("client/client.py", "import torch"),
        ("errors.py", "from service import spec"),
    ],
)
def test_a_forbidden_import_is_found(path: str, source: str) -> None:
    """Each case breaks one rule."""
    assert breaches({path: source})


@pytest.mark.parametrize(
    "modules",
    [
        {"a/x.py": "import service.a.y", "a/y.py": "import service.a.x"},
        {"a/x.py": "from service.a.y import f", "a/y.py": "from service.b import z", "b/z.py": "def f():\n    from service.a.x import g"},
        {"a/x.py": "if TYPE_CHECKING:\n    from service.a.y import T", "a/y.py": "from service.a import x"},
        {"a/__init__.py": "from service.a.x import f", "a/x.py": "from service.a import g"},
    ],
    ids=["two", "three, in a function", "for type checking", "a package and its file"],
)
def test_a_cycle_is_found(modules: dict[str, str]) -> None:
    assert cycles(modules)


def test_a_client_loads_neither_torch_nor_fastapi() -> None:
    """Importing the client must stay light, whatever is installed."""
    code = "import sys, service.client; print([m for m in ('torch', 'fastapi', 'typer', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
