"""Under /v2, Content-Type and Accept are ignored, as in Triton, whose clients send any or none; refusals are JSON."""

import json
from typing import Any

import httpx
import numpy as np
import pytest

from support.v2 import in_bytes, in_json, read, refused

INFER = "/v2/models/tiny/infer"
QUERY = np.ones((1, 2, 6), np.float32)
BODY = {"inputs": in_json(query=QUERY)}
MEDIA = ["text/xml", "application/vnd.safetensors", "text/html", "application/json;q=0", "multipart/form-data; boundary=x", ";;q=,", "\xff"]
ANSWERED: list[tuple[str, str, Any]] = [
    ("GET", "/v2", None),
    ("GET", "/v2/health/ready", None),
    ("GET", "/v2/models/tiny", None),
    ("GET", "/v2/models/tiny/ready", None),
    ("GET", "/v2/models/tiny/config", None),
    ("POST", "/v2/repository/index", {"ready": True}),
    ("POST", "/v2/repository/index", None),
    ("POST", INFER, BODY),
    ("POST", INFER, in_bytes(None, query=QUERY)),
    ("POST", "/v2/repository/models/default/load", {}),
]
REFUSED: list[tuple[str, str, Any, int]] = [
    ("POST", INFER, {"inputs": []}, 400),
    ("POST", INFER, "<inputs/>", 400),
    ("POST", INFER, None, 400),
    ("POST", "/v2/models/none/infer", BODY, 404),
    ("POST", "/v2/repository/index", "<index/>", 400),
    ("POST", "/v2/repository/models/x/load", {"parameters": {"config": "<spec/>"}}, 400),
    ("GET", "/v2/models/none/config", None, 404),
    ("GET", "/v2/nothing", None, 404),
    ("DELETE", "/v2/models/tiny", None, 405),
]


def send(v2: httpx.Client, method: str, path: str, body: Any, media: str) -> httpx.Response:
    """Sends a body: None, text, a document, or bytes and the headers that describe them."""
    content, more = body if isinstance(body, tuple) else (b"" if body is None else body if isinstance(body, str) else json.dumps(body), {})
    value = media.encode("latin-1")
    described = [(name.encode(), value.encode()) for name, value in more.items()]
    return v2.request(method, path, content=content, headers=[*described, (b"Content-Type", value), (b"Accept", value)])


@pytest.mark.parametrize("media", MEDIA)
@pytest.mark.parametrize(("method", "path", "body"), ANSWERED, ids=str)
def test_content_type_and_accept_do_not_change_the_reply(v2: httpx.Client, method: str, path: str, body: Any, media: str) -> None:
    want, got = send(v2, method, path, body, "application/json"), send(v2, method, path, body, media)

    assert got.status_code == want.status_code == 200, got.text
    assert got.headers.get("content-type") == want.headers.get("content-type")
    assert got.content == want.content


@pytest.mark.parametrize("media", MEDIA)
@pytest.mark.parametrize(("method", "path", "body", "status"), REFUSED, ids=str)
def test_refusals_have_the_form_of_the_protocol(v2: httpx.Client, method: str, path: str, body: Any, status: int, media: str) -> None:
    assert refused(send(v2, method, path, body, media), status) == refused(send(v2, method, path, body, "application/json"), status)


def test_a_page_of_another_origin_is_refused_in_json(v2: httpx.Client) -> None:
    """Before any route is looked up."""
    for path in (INFER, "/v2/models/tiny", "/v2/nothing"):
        answer = v2.request("POST" if path == INFER else "GET", path, headers={"Host": "elsewhere.example", "Accept": "text/xml"})
        refused(answer, 403)
    read(v2.post(INFER, json=BODY, headers={"Accept": "text/xml"}))
