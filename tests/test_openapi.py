"""The committed OpenAPI document is the one that the application serves; the server accepts its examples, and generated requests."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from attend.wire.schemas.schema import Schema
from support.server import Server

COMMITTED: dict[str, Any] = json.loads((Path(__file__).parent.parent / "openapi" / "openapi.json").read_text())


def examples() -> list[tuple[str, str, Any]]:
    """(method, path, body) of every example, layers first."""
    found = [
        (method, path, example["value"])
        for path, operations in COMMITTED["paths"].items()
        for method, operation in operations.items()
        for example in operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("examples", {}).values()
    ]
    return sorted(found, key=lambda item: item[0] != "put")


def test_the_server_serves_the_committed_document(http: httpx.Client) -> None:
    """Regenerate it with `attend openapi -o openapi/openapi.json`."""
    assert http.get("/openapi.json").json() == COMMITTED


KEYLESS = {"/health/live", "/health/ready", "/health/startup", "/v2/health/live", "/v2/health/ready"}


def test_the_endpoints_that_need_a_key_say_so_and_how_they_refuse_one() -> None:
    """Under /v2 a refusal is {"error": "…"}."""
    for path, operations in COMMITTED["paths"].items():
        form = {"application/json": "V2Error"} if path.startswith("/v2") else {"application/problem+json": "ProblemDocument"}
        for operation in operations.values():
            refusals = {status: reply for status, reply in operation["responses"].items() if status in ("401", "403")}
            assert set(refusals) == (set() if path in KEYLESS else {"401", "403"}), path
            for reply in refusals.values():
                assert {media: schema["schema"]["$ref"].rpartition("/")[2] for media, schema in reply["content"].items()} == form, path


def test_every_reference_in_the_document_resolves() -> None:
    references = {part.split('"')[0] for part in json.dumps(COMMITTED).split('"$ref": "')[1:]}

    assert references
    for reference in references:
        assert reference.removeprefix("#/components/schemas/") in COMMITTED["components"]["schemas"]


def test_bounds_are_in_the_words_of_json_schema() -> None:
    """Pydantic writes the bound of a field that already has one as `ge`, which no reader of the document knows."""
    assert not re.findall(r'"(?:ge|gt|le|lt)": ', json.dumps(COMMITTED))


def test_a_schema_stands_after_those_that_it_refers_to() -> None:
    """orval writes the schemas as constants in the order of the document, and one that extends a later one is no valid TypeScript."""
    schemas = COMMITTED["components"]["schemas"]
    seen: set[str] = set()
    for name, schema in schemas.items():
        referred = {part.split('"')[0] for part in json.dumps(schema).split('"$ref": "#/components/schemas/')[1:]}
        assert referred <= seen, (name, referred - seen)
        seen.add(name)
    assert "Datatype" in seen


def test_no_default_is_an_object() -> None:
    """The Go client that openapi-generator makes from such a default does not compile."""

    def defaults(node: Any) -> Iterator[Any]:
        if isinstance(node, dict) and "default" in node:
            yield node["default"]
        for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            yield from defaults(part)

    found = list(defaults(COMMITTED["components"]["schemas"]))
    assert found and not [default for default in found if isinstance(default, dict | list)]


def test_the_server_accepts_every_example(http: httpx.Client) -> None:
    """In the order in which a reader would send them. The layer is renamed, since other tests have a layer `tiny`."""
    assert len(examples()) >= 3
    session = http.post("/sessions", json={}).json()["id"]
    for method, path, body in sorted(examples(), key=lambda example: example[0] == "patch"):  # PATCH drops rows that POST has appended
        renamed = json.loads(json.dumps(body).replace('"tiny"', '"example"').replace('"length": 3', '"length": 1'))
        reply = http.request(method, path.replace("{name}", "example").replace("{id}", session), json=renamed)
        lacks_package = path == "/words/tokens" and find_spec("tokenizers") is None  # the extra `test` does not install it
        assert reply.is_success or (lacks_package and "pip install tokenizers" in reply.text), reply.text
    http.delete("/layers/example")
    http.delete(f"/sessions/{session}")


@pytest.mark.parametrize("path", ["/docs", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/docs/favicon-32x32.png"])
def test_the_server_serves_the_docs_page_and_its_assets(http: httpx.Client, path: str) -> None:
    """/docs works without internet access."""
    reply = http.get(path)

    assert reply.status_code == 200
    if path == "/docs":
        assert "https://" not in reply.text.replace("https://github.com", "")


def test_no_two_schemas_have_one_name() -> None:
    """The document has a definition by name: the second would stand in place of the first."""
    found, kinds = [Schema], set[type]()
    while found:
        kinds.add(kind := found.pop())
        found += kind.__subclasses__()
    names = [kind.__name__ for kind in kinds if kind.__module__.startswith("attend.wire")]
    assert len(names) > 30 and {name for name in names if names.count(name) > 1} == set()


# schemathesis: replies to generated requests are as the document says, and requests that it calls valid are accepted

# The first is the number for each operation and phase. .ci/run has more, and the phases coverage and stateful as well.
SCHEMA_EXAMPLES, SCHEMA_PHASES = os.environ.get("SCHEMA_EXAMPLES", "2"), os.environ.get("SCHEMA_PHASES", "examples,fuzzing")
HERE = Path(__file__).parent

# positive_data_acceptance: statuses allowed for valid data. `support/schema_check.py` accepts 400, 404, 413 and 422 only for known reasons.
# 409: the configured layer cannot be replaced on a server that stores layers. 410, 412: a session has ended, or has another length.
CONFIG = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", 400, 404, 409, 410, 412, 413, 422]

[checks.negative_data_rejection]
expected-statuses = ["4xx"]
"""


def test_replies_to_generated_requests_are_as_documented(start: Callable[..., Server], tmp_path: Path) -> None:
    """With every check of schemathesis, and `support/schema_check.py`."""
    server = start("--layers-dir", str(tmp_path / "layers"), "--session-memory", "100000000")  # keeps the layer `default`
    httpx.put(f"{server.url}/layers/tiny", json={"spec": {"d_model": 4, "num_heads": 2, "seed": 7}}).raise_for_status()
    config, report = tmp_path / "schemathesis.toml", tmp_path / "report"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "schemathesis.cli", f"--config-file={config}", "run", f"{server.url}/openapi.json", "--checks=all"]
    command += [
        "--phases",
        SCHEMA_PHASES,
        "--max-examples",
        SCHEMA_EXAMPLES,
        "--seed",
        "7",
        "--no-color",
        "--request-timeout=120",
        "--suppress-health-check=all",
        "--report-junit-path",
        str(report),
    ]
    ours = {"SCHEMATHESIS_HOOKS": "support.schema_check", "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, **ours})
    assert done.returncode == 0, done.stdout
    assert "generated" in done.stdout
    assert not [line for line in server.log if "internal_error" in json.dumps(line)]
