"""The law of the house: which room may import which, which third parties it may use, and that there are no cycles."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "service"
FLOOR_1 = {"errors", "tensors", "spec"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "tensors": {"errors"},
    "spec": {"errors", "tensors"},
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
    "spec": {"pydantic", "pydantic_core"},
    "settings": {"pydantic", "pydantic_settings"},
    "wire": {"pydantic", "pydantic_core", "orjson", "simdjson", "safetensors"},
    "attention": {"torch", "safetensors", "matplotlib"},
    "checkpoints": {"safetensors"},
    "serving": {"torch", "asyncio", "prometheus_client", "structlog", "safetensors", "tokenizers"},
    "client": {"httpx", "asyncio", "torch"},
    "web": {
        "fastapi",
        "starlette",
        "uvicorn",
        "httptools",
        "grpc",
        "grpc_health",
        "grpc_reflection",
        "google",
        "structlog",
        "opentelemetry",
    },
}
WATCHED = {"asyncio"}  # of the standard library, where event loops may be is part of the law
LEAVES = ("attention/metrics/", "attention/figures/", "attention/compare/")  # the rest of their room imports nothing of these
SETTINGS_READERS = {"cli", "web/app.py", "deploy"}


def imports(source: str) -> Iterator[str]:
    """Dotted names a module imports, wherever in the file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide the room"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


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
                inside = next((leaf for leaf in LEAVES if name.replace(".", "/").startswith(f"service/{leaf}")), path)
                if path.startswith("attention/") and not path.startswith(inside):
                    found.append(f"{path} imports {name}")
                if target == "settings" and path not in SETTINGS_READERS and room not in SETTINGS_READERS:
                    found.append(f"{path} imports {name}")
            elif parts[0] in WATCHED or parts[0] not in sys.stdlib_module_names | {"numpy"}:
                if room in THIRD_PARTIES and parts[0] not in THIRD_PARTIES[room]:
                    found.append(f"{path} imports {name}")
                if room == "client" and parts[0] == "torch" and path != "client/remote.py":
                    found.append(f"{path} imports {name}")
    return found


def cycles(modules: Mapping[str, str]) -> list[str]:
    """Modules that import themselves by way of others (imports for type checking count too little to be followed)."""
    edges: dict[str, set[str]] = {}
    for path, source in modules.items():
        name = "service." + path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        tree = ast.parse(source)
        for node in [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]:
            node.body = [ast.Pass()]
        edges[name] = set(imports(ast.unparse(tree)))
    for name, targets in edges.items():  # a name from a module is an import of the module
        edges[name] = {t if t in edges else t.rpartition(".")[0] for t in targets}

    def reaches(start: str, goal: str, seen: set[str]) -> bool:
        nexts = {n for n in edges.get(start, ()) if n in edges} - seen
        return goal in nexts or any(reaches(n, goal, seen | nexts) for n in nexts)

    return [name for name in edges if reaches(name, name, set())]


def package() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.rglob("*.py")}


def test_no_module_imports_upward_or_sideways() -> None:
    """wire knows no torch, attention no request, serving no HTTP, web nothing else."""
    assert breaches(package()) == []


def test_there_are_no_import_cycles() -> None:
    """A ring of modules has no first one to read."""
    assert cycles(package()) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("wire/json/reader.py", "import torch"),
        ("wire/json/reader.py", "from service.attention.layer import MultiHeadAttention"),
        ("attention/layer.py", "from service.wire.schemas.attend import AttendRequest"),
        ("attention/layer.py", "from service.attention.metrics.query import MetricsQuery"),
        ("attention/metrics/compute.py", "from service.attention.figures.reductions import Pooling"),
        ("attention/layer.py", "import asyncio"),
        ("serving/engine.py", "def late():\n    from fastapi import Request"),
        ("serving/engine.py", "from service.settings import Settings"),
        ("web/routes/attend.py", "from service.settings import Settings"),
        ("client/client.py", "import torch"),
        ("errors.py", "from service import spec"),
    ],
)
def test_the_check_above_can_fail(path: str, source: str) -> None:
    """Each of these breaks one law."""
    assert breaches({path: source})


def test_a_cycle_is_found() -> None:
    """Two modules that import each other are a ring."""
    assert cycles({"a/x.py": "import service.a.y", "a/y.py": "import service.a.x"})


def test_a_client_loads_neither_torch_nor_fastapi() -> None:
    """Importing the client must stay light, whatever is installed."""
    code = "import sys, service.client; print([m for m in ('torch', 'fastapi', 'typer', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
