"""ModelStreamInfer through Triton's own client and its stub: a reply to each request, in their order."""

import queue
import re
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from attend.web.grpc import messages
from attend.web.grpc.codec import refusal_in_stream
from support.grpc_calls import KEY, QUERY, SERVICE, address_of, entry, request, tensor
from support.server import Server

STREAM = f"{SERVICE}/ModelStreamInfer"


@pytest.fixture
def stub(v2_server: Server) -> Iterator[Any]:
    with grpc.insecure_channel(address_of(v2_server)) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def counted(http: httpx.Client, metric: str) -> float:
    found = re.search(rf"^{re.escape(metric)} (\S+)$", http.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_replies_come_in_order_and_a_refusal_does_not_end_the_stream(v2_server: Server, v2: httpx.Client) -> None:
    """Through Triton's client: requests of different lengths, every fifth for a layer that does not exist."""
    replies: queue.Queue[Any] = queue.Queue()
    reproducible = {"reproducible": True}
    before = {code: counted(v2, f'attend_requests_total{{endpoint="{STREAM}",status="{code}"}}') for code in ("OK", "NOT_FOUND")}
    with triton.InferenceServerClient(address_of(v2_server)) as client:
        client.start_stream(lambda result, error: replies.put((result, error)))
        for i in range(30):
            inputs = [tensor("query", QUERY), tensor("key", KEY[:, : 1 + i % 4])]
            client.async_stream_infer("none" if i % 5 == 4 else "tiny", inputs, request_id=str(i), parameters=reproducible)
        got = [replies.get(timeout=60) for _ in range(30)]
        client.stop_stream()

        for i, (result, error) in enumerate(got):
            if i % 5 == 4:
                assert isinstance(error, InferenceServerException) and "none" in str(error)
            else:
                assert result.get_response().id == str(i)
                assert result.as_numpy("attention_weights").shape == (2, 3, 3, 1 + i % 4)
                assert "triton_final_response" not in result.get_response().parameters
        alone = client.infer("tiny", [tensor("query", QUERY), tensor("key", KEY[:, :4])], parameters=reproducible)
        np.testing.assert_array_equal(got[3][0].as_numpy("output"), alone.as_numpy("output"))
    assert replies.empty()
    for code, count in (("OK", 24), ("NOT_FOUND", 6)):
        assert counted(v2, f'attend_requests_total{{endpoint="{STREAM}",status="{code}"}}') - before[code] == count


def test_a_reply_has_the_final_response_flag_if_requested(stub: Any) -> None:
    query = entry("query", [1, 1, 6], fp32_contents=[0.5] * 6)
    wanted = [{"triton_enable_empty_final_response": {"bool_param": value}} for value in (True, False)]

    first, second, third = stub.ModelStreamInfer(iter([request("tiny", query, parameters=each) for each in (*wanted, {})]), timeout=60)

    assert first.infer_response.parameters["triton_final_response"].bool_param is True
    assert "triton_final_response" not in second.infer_response.parameters
    assert "triton_final_response" not in third.infer_response.parameters


def test_a_refusal_in_a_stream_has_the_id_and_the_reason(stub: Any) -> None:
    wrong = request("tiny", entry("query", [1, 1, 5], fp32_contents=[0.5] * 5), id="mine")

    (reply,) = stub.ModelStreamInfer(iter([wrong]), timeout=60)

    assert "/inputs/0" in reply.error_message
    assert reply.infer_response.id == "mine" and not reply.infer_response.outputs


def test_a_stream_is_read_only_as_fast_as_it_is_answered_and_ends_with_its_client(start: Callable[..., Server]) -> None:
    """A batch waits up to a second for more calls, which is enough for all of them. An open stream does not delay the server's exit."""
    server = start("--grpc-port", "0", "--batch-delay", "1")
    good = request("default", entry("query", [1, 1, 64], fp32_contents=[0.5] * 64))
    with_timeout = request("default", good.inputs[0], parameters={"timeout": {"int64_param": 100_000}})
    with grpc.insecure_channel(address_of(server)) as channel, httpx.Client(base_url=server.url) as http:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert len(list(stub.ModelStreamInfer(iter([good] * 40), timeout=60))) == 40
        batches = counted(http, "attend_batch_calls_count")
        assert batches >= 3 and counted(http, 'attend_batch_calls_bucket{le="16.0"}') == batches

        leaving = stub.ModelStreamInfer(iter([good] * 3))
        with pytest.raises(grpc.RpcError, match="deadline"):
            stub.ModelInfer(with_timeout)  # by now the server has received the stream
        staying, before = stub.ModelInfer.future(good), counted(http, "attend_abandoned_calls_total")
        leaving.cancel()
        for _ in range(20):  # cancelled while the server waits for their next request
            silent: queue.Queue[Any] = queue.Queue()
            silent.put(with_timeout)
            cancelled = stub.ModelStreamInfer(iter(silent.get, None))
            next(cancelled)
            cancelled.cancel()
            silent.put(None)
        assert len(staying.result(60).outputs) == 2
        assert counted(http, "attend_abandoned_calls_total") > before

        more: queue.Queue[Any] = queue.Queue()
        open_stream = stub.ModelStreamInfer(iter(more.get, None))
        more.put(good)
        assert not next(open_stream).error_message
        server.process.terminate()
        assert list(open_stream) == [] and open_stream.code() is grpc.StatusCode.OK
        more.put(None)
    server.process.wait(30)
    assert not [event for event in server.events if event["level"] == "error"]


def test_the_id_of_a_refused_request_is_read_without_the_request() -> None:
    """A second reading of a message with a million fields would block the event loop."""
    named, raw = messages.ModelInferRequest(model_name="default", id="mine").SerializeToString(), b":\0"
    for body, expected in ((named + raw * 1_000_003, "mine"), (named + b"\xff", "mine"), (raw * 67 + named, ""), (b"\xff", ""), (b"", "")):
        reply = messages.ModelStreamInferResponse.FromString(refusal_in_stream(body, "too many"))
        assert (reply.infer_response.id, reply.error_message) == (expected, "too many")
