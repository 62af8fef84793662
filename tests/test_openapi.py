"""The committed OpenAPI document is the one the application serves, and its examples are answered as it says."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

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


def test_the_committed_document_is_what_is_served(http: httpx.Client) -> None:
    """Regenerate it with `attend openapi -o openapi/openapi.json`."""
    assert http.get("/openapi.json").json() == COMMITTED


def test_every_reference_in_the_document_resolves() -> None:
    """A generated client would stumble over one that does not."""
    references = {part.split('"')[0] for part in json.dumps(COMMITTED).split('"$ref": "')[1:]}

    assert references
    for reference in references:
        assert reference.removeprefix("#/components/schemas/") in COMMITTED["components"]["schemas"]


def test_no_default_is_an_object() -> None:
    """With one that is, the client that openapi-generator makes for Go does not compile."""

    def defaults(node: Any) -> Iterator[Any]:
        if isinstance(node, dict) and "default" in node:
            yield node["default"]
        for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            yield from defaults(part)

    found = list(defaults(COMMITTED["components"]["schemas"]))
    assert found and not [default for default in found if isinstance(default, dict | list)]


def test_every_example_is_answered(http: httpx.Client) -> None:
    """Posted in an order in which a reader would, with another name of the layer: other tests have one called tiny."""
    assert len(examples()) >= 3
    session = http.post("/sessions", json={}).json()["id"]
    for method, path, body in sorted(examples(), key=lambda example: example[0] == "patch"):  # rows are appended, then dropped
        renamed = json.loads(json.dumps(body).replace('"tiny"', '"example"').replace('"length": 3', '"length": 1'))
        reply = http.request(method, path.replace("{name}", "example").replace("{id}", session), json=renamed)
        assert reply.is_success, reply.text
    http.delete("/layers/example")
    http.delete(f"/sessions/{session}")


@pytest.mark.parametrize("path", ["/docs", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/docs/favicon-32x32.png"])
def test_the_page_and_its_assets_come_from_here(http: httpx.Client, path: str) -> None:
    """/docs works without any network."""
    reply = http.get(path)

    assert reply.status_code == 200
    if path == "/docs":
        assert "https://" not in reply.text.replace("https://github.com", "")
