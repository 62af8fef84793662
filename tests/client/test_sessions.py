"""Sessions of both clients with a real server: steps against one causal call, forks, files, lost replies, and their end."""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from attend import errors
from attend.client import AsyncClient, AsyncSession, Client, ReplyLost, Retries, Session
from attend.wire.schemas.sessions import SessionAttendRequest
from support.server import Server

RNG = np.random.default_rng(0)
LENGTH, STEPS = 31, (5, 1, 1, 7, 1, 3, 13)
LAYER = {"d_model": 6, "num_heads": 2, "seed": 3, "dtype": "float64"}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as client:
        client.put_layer("steps", LAYER)
        client.put_layer("window", {**LAYER, "window": {"left": 2, "right": 0}})
        yield client
        client.delete_layer("steps")
        client.delete_layer("window")


def rows(count: int = LENGTH) -> Any:
    return RNG.standard_normal((count, 6))


def chunks(sequence: Any) -> list[Any]:
    return np.split(sequence, np.cumsum(STEPS)[:-1])


def test_steps_equal_one_causal_call(client: Client) -> None:
    sequence = rows()
    whole = client.attend(sequence, layer="steps", causal=True)

    with client.session("steps") as session:
        results = [session.attend(chunk, causal=True) for chunk in chunks(sequence)]
        assert session.length == LENGTH == session.info().length
    assert [result.session_length for result in results] == np.cumsum(STEPS).tolist()
    np.testing.assert_allclose(np.concatenate([result.output for result in results]), whole.output, rtol=0, atol=1e-12)
    last = results[-1].attention_weights
    np.testing.assert_allclose(last, whole.attention_weights[:, -STEPS[-1] :], rtol=0, atol=1e-12)


def test_both_clients_have_the_same_sessions(client: Client, server: Server) -> None:
    sequence = rows()
    with client.session("steps") as session:
        expected = [session.attend(chunk, causal=True, reproducible=True).output for chunk in chunks(sequence)]

    async def everything() -> list[Any]:
        async with AsyncClient(server.url) as other:
            async with other.session("steps") as session:
                outputs = [(await session.attend(chunk, causal=True, reproducible=True)).output for chunk in chunks(sequence)]
                async with session.fork(7) as fork:
                    assert fork.length == 7 and fork.id != session.id
                await session.truncate(9)
                file = await session.export()
                loaded = await other.session("steps")
                await loaded.load(file)
                assert (loaded.length, (await loaded.info()).length) == (9, 9)
                resumed = await other.session(id=session.id)
                assert resumed.length == 9
                assert {session.id, loaded.id} <= {found.id for found in await other.sessions()}
                await loaded.delete()
            with pytest.raises(errors.SessionEnded):
                await session.info()
            with pytest.raises(errors.SessionEnded):
                await fork.info()
            return outputs

    for mine, theirs in zip(asyncio.run(everything()), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_both_sessions_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, Any]:
        return {name: f for name, f in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}

    waiting, other = methods(Session), methods(AsyncSession)
    assert waiting.keys() == other.keys()
    for name in waiting.keys() - {"fork"}:
        assert str(inspect.signature(waiting[name])) == str(inspect.signature(other[name])), name
        assert inspect.iscoroutinefunction(other[name]), name
    for first, second in ((Session.fork, AsyncSession.fork), (Client.session, AsyncClient.session)):
        assert inspect.signature(first).parameters == inspect.signature(second).parameters


def test_each_field_of_a_step_is_a_typed_and_described_argument() -> None:
    parameters = inspect.signature(Session.attend).parameters
    assert (parameters.keys() - {"self", "timeout"}) ^ SessionAttendRequest.model_fields.keys() == {"layer"}
    for name in parameters.keys() - {"self", "query", "key", "value", "timeout"}:
        assert f"\n{name}: " in str(inspect.getdoc(Session.attend))


@pytest.mark.parametrize(
    "given",
    [
        lambda x: x,
        lambda x: x[None],
        lambda x: x.tolist(),
        lambda x: torch.tensor(x),
        lambda x: {"datatype": "FP64", "shape": list(x.shape), "data": x.ravel().tolist()},
    ],
    ids=["array", "batch of one", "list", "torch", "wire"],
)
def test_steps_take_every_form_of_tensor(client: Client, server: Server, given: Callable[[Any], Any]) -> None:
    """In each form, the client counts the rows of a step whose reply was lost."""
    query = rows(3)
    with Client(server.url, transport=Losing(lost=1), retries=Retries(first=0)) as losing, losing.session("steps") as session:
        with pytest.raises(ReplyLost):
            session.attend(given(query), causal=True)
        session.truncate(0)
        expected = client.attend(query, layer="steps", causal=True).output
        np.testing.assert_allclose(session.attend(given(query), causal=True).output.reshape(3, 6), expected, rtol=0, atol=1e-12)


def test_keys_are_appended_unless_append_is_false(client: Client) -> None:
    query, key = rows(2), rows(5)
    with client.session("steps") as session:
        result = session.attend(query, key, key)
        np.testing.assert_allclose(result.output, client.attend(query, key, layer="steps").output, rtol=0, atol=1e-12)
        assert session.length == 5
        again = session.attend(query, append=False, reply={"form": "nested"})
        np.testing.assert_allclose(again.output, result.output, rtol=0, atol=1e-12)
        assert session.length == again.session_length == 5


def test_forks_and_truncated_sessions_do_not_affect_each_other(client: Client) -> None:
    sequence = rows()
    whole = client.attend(sequence, layer="steps", causal=True).output
    with client.session("steps") as session:
        session.attend(sequence, causal=True)
        with session.fork(17) as fork:
            session.truncate(17)
            session.attend(rows(3), causal=True)
            assert (session.length, fork.length) == (20, 17)
            np.testing.assert_allclose(fork.attend(sequence[17:], causal=True).output, whole[17:], rtol=0, atol=1e-12)
        with pytest.raises(errors.SessionEnded, match="deleted"):
            fork.info()
        with pytest.raises(errors.InvalidRequest, match="at most 20"):
            session.truncate(21)
        assert session.length == 20


def test_a_file_of_rows_is_loaded_from_bytes_and_from_a_path(client: Client, tmp_path: Any) -> None:
    sequence, file = rows(), tmp_path / "cache.safetensors"
    with client.session("steps") as session, client.session("steps") as first, client.session("steps") as second:
        session.attend(sequence[:23], causal=True)
        file.write_bytes(session.export())
        first.load(session.export())
        second.load(file)
        outputs = [one.attend(sequence[23:], causal=True, reproducible=True).output for one in (session, first, second)]
        with client.session("window") as other, pytest.raises(errors.SessionConflict, match="fingerprint"):
            other.load(file)
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(outputs[0], outputs[2])


def test_a_resumed_session_is_not_deleted_at_the_end_of_its_block(client: Client) -> None:
    with client.session("steps", capacity=7, idle_seconds=60) as session:
        session.attend(rows(4))
        with client.session(id=session.id) as resumed:
            assert (resumed.length, resumed.layer.name) == (4, "steps")
            resumed.attend(rows(2))
        document = session.info()
        assert (session.length, document.capacity, document.idle_seconds) == (6, 7, 60)
        assert session.id in [found.id for found in client.sessions()]
        with pytest.raises(errors.TooLarge, match="at most 7 rows"):
            session.attend(rows(2))
        with pytest.raises(errors.InvalidRequest, match="capacity"):
            client.session(id=session.id, capacity=9)
    assert session.id not in [found.id for found in client.sessions()]


def test_an_exception_in_a_block_is_raised_although_the_session_is_deleted(client: Client) -> None:
    with pytest.raises(KeyError), client.session("steps") as session:
        session.delete()
        raise KeyError


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [({"layer": "steps"}, "no layer"), ({"dropped": 1}, "dropped"), ({"Q": 1}, "query"), ({"append": False, "key": [[0.0] * 6]}, "no key")],
)
def test_invalid_fields_of_a_step_are_refused(client: Client, fields: dict[str, Any], refusal: str) -> None:
    with client.session("steps") as session:
        with pytest.raises(errors.InvalidRequest, match=refusal):
            session.attend(rows(1), **fields)
        assert session.length == 0


@pytest.mark.parametrize("query", [np.ones(6), [[1.0], [1.0, 2.0]], {"data": [1.0]}], ids=["one axis", "ragged", "no shape"])
def test_a_query_that_is_not_a_tensor_of_rows_is_refused(client: Client, query: Any) -> None:
    with client.session("steps") as session, pytest.raises(errors.InvalidRequest, match="query"):
        session.attend(query)


def test_steps_of_another_client_are_refused_with_the_true_length(client: Client) -> None:
    with client.session("steps") as session, client.session(id=session.id) as other:
        other.attend(rows(5))
        with pytest.raises(errors.LengthMismatch, match="the length of the session is 5, but expected_length is 0") as refused:
            session.attend(rows(2))
        assert not isinstance(refused.value, ReplyLost)
        assert session.length == refused.value.length == 5
        assert session.attend(rows(2)).session_length == 7


def test_of_two_concurrent_steps_one_is_computed_and_one_refused(server: Server, client: Client) -> None:
    """The refused one does not raise ReplyLost, although the session has the length that the step would give it."""

    async def both() -> list[Any]:
        async with AsyncClient(server.url) as other, other.session("steps") as session:
            steps = (session.attend(rows(1)), session.attend(rows(1)))
            return [session.length, *await asyncio.gather(*steps, return_exceptions=True), session.length]

    before, first, second, after = asyncio.run(both())
    assert (before, after) == (0, 1)
    assert [type(one) for one in (first, second)].count(errors.LengthMismatch) == 1


# --- lost replies ---------------------------------------------------------------------------------------------------------------------


class Losing(httpx.HTTPTransport):
    """A connection that breaks before it sends a step, `unsent` times, and then after the reply to a step, `lost` times."""

    def __init__(self, unsent: int = 0, lost: int = 0) -> None:
        super().__init__()
        self.unsent, self.lost = unsent, lost

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        step = request.url.path.endswith("/attend")
        if step and self.unsent:
            self.unsent -= 1
            raise httpx.WriteError("reset")
        response = super().handle_request(request)
        if step and self.lost:
            self.lost -= 1
            response.read()
            raise httpx.ReadError("reset")
        return response


def test_a_step_that_did_not_arrive_is_repeated(client: Client, server: Server) -> None:
    sequence = rows(2)
    with Client(server.url, transport=Losing(unsent=2), retries=Retries(first=0)) as losing, losing.session("steps") as session:
        result = session.attend(sequence, causal=True)
        assert result.session_length == session.length == 2
    np.testing.assert_allclose(result.output, client.attend(sequence, layer="steps", causal=True).output, rtol=0, atol=1e-12)


def test_reply_lost_says_that_the_step_was_computed_and_its_result_can_be_computed_again(client: Client, server: Server) -> None:
    sequence = rows(6)
    with Client(server.url, transport=Losing(lost=1), retries=Retries(first=0)) as losing, losing.session("steps") as session:
        with pytest.raises(ReplyLost, match="the session has 4 rows") as lost:
            session.attend(sequence[:4], causal=True)
        assert session.length == lost.value.length == session.info().length == 4
        again = session.attend(sequence[:4], causal=True, append=False, query_offset=0)
        later = session.attend(sequence[4:], causal=True)
    whole = client.attend(sequence, layer="steps", causal=True).output
    np.testing.assert_allclose(np.concatenate([again.output, later.output]), whole, rtol=0, atol=1e-12)


def test_without_retries_repeating_a_computed_step_raises_reply_lost(server: Server, client: Client) -> None:
    with Client(server.url, transport=Losing(lost=1), retries=0) as losing, losing.session("steps") as session:
        row = rows(1)
        with pytest.raises(errors.Unreachable):
            session.attend(row)
        with pytest.raises(ReplyLost):
            session.attend(row)
        assert session.length == 1


def test_another_step_after_a_lost_reply_is_refused(server: Server, client: Client) -> None:
    """It was not computed, although the session has the length after it."""
    with Client(server.url, transport=Losing(lost=1), retries=0) as losing, losing.session("steps") as session:
        with pytest.raises(errors.Unreachable):
            session.attend(rows(1))
        with pytest.raises(errors.LengthMismatch) as refused:
            session.attend(rows(1))
        assert not isinstance(refused.value, ReplyLost) and session.length == 1


def test_analysis_plan_and_figure_take_a_session(client: Client) -> None:
    rows = np.random.default_rng(5).standard_normal((7, 64)).astype(np.float32)
    with client.session() as session:
        session.attend(rows, causal=True)
        fields: dict[str, Any] = {"query_offset": 4, "causal": True, "session": session.id}
        ours = client.analysis(rows[4:], metrics=["entropy"], **fields)
        whole = client.analysis(rows[4:], rows, metrics=["entropy"], query_offset=4, causal=True)

        np.testing.assert_allclose(ours.metrics["entropy"], whole.metrics["entropy"], rtol=1e-5)
        assert client.plan(rows[4:], **fields).outputs["attention_weights"].shape == [8, 3, 7]
        assert client.figure(rows[4:], format="svg", **fields).startswith(b"<")
        with pytest.raises(errors.InvalidRequest, match="no layer beside session"):
            client.analysis(rows[4:], layer="other", **fields)
