"""AsyncClient and Client have the same methods, parameters, results and refusals."""

import asyncio
import inspect
import json

import httpx
import numpy as np
import pytest

from attend import errors
from attend.client import AsyncClient, Client
from attend.wire.negotiation import JSON, SAFETENSORS

QUERY = np.random.default_rng(0).standard_normal((2, 3, 64)).astype(np.float32)


def methods(kind):
    return {name: f for name, f in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def test_both_clients_have_the_same_methods():
    """With the same signatures."""
    waiting, other = methods(Client), methods(AsyncClient)
    assert waiting.keys() == other.keys()
    for name in waiting.keys() - {"session"}:  # of test_sessions.py
        assert str(inspect.signature(waiting[name])) == str(inspect.signature(other[name])), name
        assert inspect.iscoroutinefunction(other[name]), name
    kept = [p.replace(annotation=None) for p in inspect.signature(Client).parameters.values()]
    assert kept == [p.replace(annotation=None) for p in inspect.signature(AsyncClient).parameters.values()]


def test_both_clients_get_equal_results(server):
    async def everything():
        async with AsyncClient(server.url) as client:
            await client.put_layer("async", {"d_model": 64, "num_heads": 4, "seed": 5})
            result = await client.attend(QUERY, layer="async", causal=True, reproducible=True)
            with pytest.raises(errors.InvalidRequest, match="expected query, which is also the key"):
                await client.attend(Q=QUERY)
            found = (
                await client.vocabulary(),
                await client.layers(),
                await client.layer("async"),
                await client.plan(QUERY, layer="async"),
                await client.ready(),
            )
            with Client(server.url) as waiting:
                expected = waiting.attend(QUERY, layer="async", causal=True, reproducible=True)
                assert found == (waiting.vocabulary(), waiting.layers(), waiting.layer("async"), waiting.plan(QUERY, layer="async"), True)
            await client.delete_layer("async")
            with pytest.raises(errors.LayerNotFound):
                await client.attend(QUERY, layer="async")
            return result, expected

    result, expected = asyncio.run(everything())
    assert set(result) == {"output", "attention_weights"}
    for name in result:
        np.testing.assert_array_equal(result[name], expected[name])


def test_many_calls_share_few_connections(server):
    """Connections are kept: fifty calls, eight at a time, open at most eight."""

    async def opened():
        connections = set()

        async def trace(name, info):
            if name == "connection.connect_tcp.complete":
                connections.add(info["return_value"])

        async with AsyncClient(server.url) as client:
            client.http.event_hooks["request"] = [lambda request: _traced(request, trace)]
            for _ in range(6):
                await asyncio.gather(*(client.attend(QUERY, outputs=["output"]) for _ in range(8)))
        return len(connections)

    async def _traced(request, trace):
        request.extensions["trace"] = trace

    assert 1 <= asyncio.run(opened()) <= 8


# --- media types ----------------------------------------------------------------------------------------------------------------------


REPLY = {"layer": {"name": "default", "fingerprint": "f"}, "fully_masked_rows": 0, "output": [[1.0]]}


def wire(kind, handle):
    async def later(request):
        return handle(request)

    return kind(transport=httpx.MockTransport(handle if kind is Client else later), api_key="secret")


def attended(client, times):
    async def several():
        return [await client.attend(QUERY) for _ in range(times)]

    return asyncio.run(several()) if isinstance(client, AsyncClient) else [client.attend(QUERY) for _ in range(times)]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("status", [415, 406])
def test_after_safetensors_is_refused_json_is_sent(kind, status):
    seen = []

    def handle(request):
        seen.append(request.headers["content-type"])
        if request.headers["content-type"] != JSON:
            title = (errors.UnsupportedMediaType if status == 415 else errors.NotAcceptable).title
            return httpx.Response(status, json={"title": title, "status": status, "detail": "", "request_id": "", "errors": []})
        assert json.loads(request.content)["reply"] == {"form": "base64"}
        return httpx.Response(200, json=REPLY)

    results = attended(wire(kind, handle), 2)
    assert seen == [SAFETENSORS, JSON, JSON] and results[1].output.tolist() == [[1.0]]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_reply_in_json_is_read_although_safetensors_was_requested(kind):
    assert attended(wire(kind, lambda request: httpx.Response(200, json=REPLY)), 1)[0].output.tolist() == [[1.0]]


def test_equal_arguments_are_sent_once(server):
    sizes = []
    with Client(server.url) as client:
        client.http.event_hooks["request"] = [lambda request: sizes.append(len(request.content))]
        once = client.attend(QUERY, reproducible=True)
        thrice = client.attend(QUERY, QUERY, QUERY, reproducible=True)
        keys = client.attend(QUERY, QUERY * 2, outputs=["output"], reproducible=True)
        both = client.attend(QUERY, key := QUERY * 2, key, outputs=["output"], reproducible=True)
        three = client.attend(QUERY, QUERY.copy(), QUERY * 2, outputs=["output"])
    assert sizes[0] == sizes[1] and sizes[2] == sizes[3] < sizes[4]
    np.testing.assert_array_equal(once.output, thrice.output)
    np.testing.assert_array_equal(keys.output, both.output)
    assert not np.array_equal(three.output, both.output)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_the_key_is_sent_as_a_bearer_token_alone(kind):
    def handle(request):
        assert request.headers["authorization"] == "Bearer secret"
        assert b"secret" not in request.content
        return httpx.Response(200, json=REPLY)

    client = wire(kind, handle)
    attended(client, 1)
    assert "secret" not in repr(client) + repr(client.http.headers)
