"""Which requests are retried: the policy with an injected clock and generator, and both clients over a transport that counts requests."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import numpy as np
import pytest

from attend.client import AsyncClient, Client, Retries, Unreachable, operations
from attend.client.connection import Attempts, retry_after
from attend.errors import AttendError, NotReady, Overloaded, ServiceFault
from attend.web.errors import problem_document

QUERY = np.ones((2, 3, 6), np.float32)
ATTEND, DELETE = operations.attend(QUERY), operations.delete_layer("x")
PUT = operations.put_layer("x", {"d_model": 6, "num_heads": 2}, None)
REFUSED = httpx.ConnectError("refused")
BROKEN = httpx.ReadError("reset")
SLOW = httpx.ReadTimeout("slow")


def ours(kind, status, **headers):
    return httpx.Response(
        status, content=problem_document(status, kind.title, "", "id"), headers={"content-type": "application/problem+json", **headers}
    )


@pytest.mark.parametrize(
    ("call", "outcome", "again"),
    [
        (ATTEND, REFUSED, True),
        (ATTEND, BROKEN, True),
        (ATTEND, httpx.RemoteProtocolError("hung up"), True),
        (ATTEND, SLOW, False),
        (ATTEND, httpx.UnsupportedProtocol("ftp"), False),
        (ATTEND, ours(ServiceFault, 500), False),
        (PUT, httpx.Response(500), False),
        *((ATTEND, httpx.Response(status), again) for status, again in ((429, True), (502, True), (503, True), (504, False), (500, True))),
        *((ATTEND, httpx.Response(status), False) for status in (200, 400, 404, 413, 422, 507)),
        *(
            (call, outcome, again)
            for call in (PUT, DELETE)
            for outcome, again in (
                (REFUSED, True),
                (BROKEN, False),
                (httpx.RemoteProtocolError("hung up"), False),
                (SLOW, False),
                (httpx.Response(503), False),
                (httpx.Response(502), False),
                (ours(NotReady, 503), True),
                (ours(Overloaded, 429), True),
            )
        ),
        (operations.ready(), REFUSED, False),
        (operations.ready(), httpx.Response(503), False),
    ],
)
def test_only_requests_that_cannot_repeat_a_change_are_retried(call, outcome, again):
    assert (Attempts(Retries(), call, None).next_delay(outcome) is not None) == again


@pytest.mark.parametrize(
    ("outcome", "may_be_computed"),
    [
        (REFUSED, False),
        (BROKEN, True),
        (SLOW, True),
        (httpx.Response(502), True),
        (ours(ServiceFault, 500), True),
        (ours(Overloaded, 429), False),
        (httpx.Response(412), False),
        (httpx.Response(200), False),
    ],
)
def test_on_unanswered_is_called_for_attempts_that_may_have_been_computed(outcome, may_be_computed):
    """Whether or not they are repeated."""
    unanswered = []
    Attempts(Retries(times=0), replace(ATTEND, on_unanswered=lambda: unanswered.append(outcome)), None).next_delay(outcome)
    assert unanswered == [outcome] * may_be_computed


@pytest.mark.parametrize(("retries", "times"), [(None, 4), (0, 0), (3, 3), (Retries(times=2), 2)])
def test_retries_can_be_given_as_a_number(retries, times):
    with Client("http://127.0.0.1:9", retries=retries) as client:
        assert client.retries.times == times


def test_delays_double_up_to_a_bound():
    attempts = Attempts(Retries(times=5, first=0.1, longest=0.5), ATTEND, None, draw=lambda: 1.0)
    assert [attempts.next_delay(BROKEN) for _ in range(6)] == [0.1, 0.2, 0.4, 0.5, 0.5, None]


def test_delays_are_drawn_between_zero_and_the_bound():
    draws = iter([0.0, 0.5])
    attempts = Attempts(Retries(first=0.1), ATTEND, None, draw=lambda: next(draws))
    assert [attempts.next_delay(BROKEN), attempts.next_delay(BROKEN)] == [0.0, 0.1]


def test_retry_after_is_the_shortest_delay():
    attempts = Attempts(Retries(first=0.1), ATTEND, None, draw=lambda: 0.5)
    assert attempts.next_delay(httpx.Response(429, headers={"Retry-After": "7"})) == pytest.approx(7.05)


def test_retry_after_may_be_a_date_or_invalid():
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    assert 90 < retry_after(httpx.Response(503, headers={"Retry-After": soon})) <= 100
    assert retry_after(httpx.Response(503, headers={"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"})) == 0
    assert retry_after(httpx.Response(503, headers={"Retry-After": "soon"})) == 0


def test_no_delay_exceeds_the_timeout():
    now = [0.0]
    attempts = Attempts(Retries(), ATTEND, 10.0, clock=lambda: now[0], draw=lambda: 0.0)
    assert attempts.next_delay(httpx.Response(429, headers={"Retry-After": "9"})) == 9
    now[0] = 2.0
    assert attempts.next_delay(httpx.Response(429, headers={"Retry-After": "9"})) is None


def answering(kind, *answers):
    """A client over a transport that gives these outcomes, the last repeatedly; and the requests that were sent."""
    sent = []

    def handle(request):
        sent.append(request)
        answer = answers[min(len(sent), len(answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    async def handle_async(request):
        return handle(request)

    transport = httpx.MockTransport(handle if kind is Client else handle_async)
    return kind(transport=transport, retries=Retries(times=3, first=0.0)), sent


def layers_of(client):
    """The result of `client.layers()` of either client."""
    found = client.layers()
    return asyncio.run(found) if asyncio.iscoroutine(found) else found


KINDS = pytest.mark.parametrize("kind", [Client, AsyncClient])


@KINDS
def test_an_operation_that_failed_twice_succeeds(kind):
    client, sent = answering(kind, BROKEN, ours(NotReady, 503), httpx.Response(200, json={"layers": []}))
    assert layers_of(client) == [] and len(sent) == 3


@KINDS
@pytest.mark.parametrize(("failure", "raised"), [(BROKEN, Unreachable), (ours(NotReady, 503), NotReady)])
def test_the_last_failure_is_raised(kind, failure, raised):
    client, sent = answering(kind, failure)
    with pytest.raises(raised):
        layers_of(client)
    assert len(sent) == 4


@KINDS
def test_a_change_that_may_have_been_made_is_not_repeated(kind):
    client, sent = answering(kind, BROKEN)
    with pytest.raises(AttendError):
        made = client.delete_layer("x")
        asyncio.run(made)
    assert len(sent) == 1


@pytest.mark.parametrize("timeout", [30.0, None])
def test_the_timeout_limits_all_attempts_together(timeout):
    """A later attempt has the time that the earlier ones left, in both clients."""

    def serve(seen):
        def answer(request):
            seen.append(request.extensions["timeout"]["read"])
            return httpx.Response(503) if len(seen) < 3 else httpx.Response(200, json={"layers": []})

        return httpx.MockTransport(answer)

    retries = Retries(first=0.001)
    sync_seen, async_seen = [], []
    with Client("http://127.0.0.1:9", timeout=timeout, retries=retries, transport=serve(sync_seen)) as client:
        assert client.layers() == []

    async def scenario():
        async with AsyncClient("http://127.0.0.1:9", timeout=timeout, retries=retries, transport=serve(async_seen)) as client:
            assert await client.layers() == []

    asyncio.run(scenario())
    for seen in (sync_seen, async_seen):
        assert seen == [None] * 3 if timeout is None else timeout >= seen[0] > seen[1] > seen[2] > 0


@pytest.mark.parametrize("timeout", ["x", -1, float("nan"), float("inf"), [1.0]], ids=str)
def test_a_timeout_that_is_no_number_of_seconds_is_refused(timeout):
    """By both clients, and before a request is sent."""
    sent = []
    transport = httpx.MockTransport(sent.append)
    expected = f"expected a timeout in seconds, 0 or more, or None for no limit, got {timeout!r}"

    async def scenario():
        async with AsyncClient("http://127.0.0.1:9", transport=transport) as client:
            await client.attend(QUERY, timeout=timeout)

    with Client("http://127.0.0.1:9", transport=transport) as client:
        for call in (
            lambda: client.attend(QUERY, timeout=timeout),
            lambda: client.ready(timeout=timeout),
            lambda: asyncio.run(scenario()),
            lambda: Client("http://127.0.0.1:9", timeout=timeout),
            lambda: AsyncClient("http://127.0.0.1:9", timeout=timeout),
        ):
            with pytest.raises(ValueError) as refused:
                call()
            assert str(refused.value) == expected
    assert not sent
