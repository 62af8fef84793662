"""KServe's InferenceRESTClient and InferenceGRPCClient against the servers named on the command line: http://host:port host:port.

It needs an environment of its own, since it installs half a gigabyte.
"""

import asyncio
import sys

import grpc
import httpx
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

QUERY = np.random.default_rng(5).standard_normal((2, 3, 64)).astype(np.float32)


def request(binary: bool, **more: object) -> InferRequest:
    query = InferInput("query", list(QUERY.shape), "FP32")
    query.set_data_from_numpy(QUERY, binary_data=binary)
    return InferRequest(model_name="default", infer_inputs=[query], **more)


async def check_grpc(address: str, want: dict[str, object]) -> None:
    """It sends the size of each tensor, and requests outputs as bytes."""
    async with InferenceGRPCClient(address) as client:
        assert await client.is_server_live() is True
        assert await client.is_server_ready() is True
        assert await client.is_model_ready("default") is True
        outputs = [RequestedOutput("output", {"binary_data": True}), RequestedOutput("attention_weights", {"binary_data": False})]
        for body in (request(False), request(True), request(True, request_outputs=outputs)):
            reply = await client.infer(body)
            for name in ("output", "attention_weights"):
                np.testing.assert_allclose(reply.get_output_by_name(name).as_numpy(), want[name], rtol=0, atol=1e-6)
        try:
            await client.infer(request(True, parameters={"temperature": 1}))
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "/parameters/temperature" in error.details(), error
        else:
            raise AssertionError("a parameter that means nothing was taken")


async def check_rest(url: str, want: dict[str, object]) -> None:
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
        assert await client.is_server_live(url) is True
        assert await client.is_server_ready(url) is True
        assert await client.is_model_ready(url, "default") is True
        assert await client.is_model_ready(url, "none") is False
        outputs = [RequestedOutput("output", {"binary_data": True}), RequestedOutput("attention_weights", {"binary_data": False})]
        for body in (
            request(False),
            request(True),
            request(True, parameters={"binary_data_output": True}),
            request(True, request_outputs=outputs),
            {"inputs": [{"name": "query", "shape": [2, 3, 64], "datatype": "FP32", "data": QUERY.ravel().tolist()}]},
        ):
            reply = await client.infer(url, body, model_name="default")
            assert reply.model_name == "default"
            for name in ("output", "attention_weights"):
                np.testing.assert_allclose(reply.get_output_by_name(name).as_numpy(), want[name], rtol=0, atol=1e-6)
        try:
            await client.infer(url, request(True, parameters={"temperature": 1}), model_name="default")
        except httpx.HTTPStatusError as error:
            assert "/parameters/temperature" in str(error) and "400" in str(error), error
        else:
            raise AssertionError("a parameter that means nothing was taken")


async def check(url: str, address: str) -> None:
    want = httpx.post(f"{url}/attend", json={"query": QUERY.tolist()}).json()
    await check_rest(url, want)
    await check_grpc(address, want)


asyncio.run(check(*sys.argv[1:]))
print("KServe's clients: good")
