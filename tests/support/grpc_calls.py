"""Messages of GRPCInferenceService made by hand, and where a server listens for them."""

from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2

from support.server import Server

QUERY = np.random.default_rng(31).standard_normal((2, 3, 6)).astype(np.float32)
KEY = np.random.default_rng(32).standard_normal((2, 5, 6)).astype(np.float32)
SERVICE = "inference.GRPCInferenceService"
INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
Array = np.ndarray[Any, Any]


def tensor(name: str, array: Array, datatype: str = "FP32") -> Any:
    made = triton.InferInput(name, array.shape, datatype)
    made.set_data_from_numpy(array)
    return made


def address_of(server: Server) -> str:
    return str(next(event["address"] for event in server.events if event["event"] == "listening for gRPC"))


def request(model: str = "tiny", *inputs: Any, **members: Any) -> Any:
    return service_pb2.ModelInferRequest(model_name=model, inputs=inputs, **members)


def entry(name: str, shape: list[int], datatype: str = "FP32", parameters: Any = None, **contents: Any) -> Any:
    typed = {"contents": service_pb2.InferTensorContents(**contents)} if contents else {}
    return service_pb2.ModelInferRequest.InferInputTensor(name=name, shape=shape, datatype=datatype, parameters=parameters, **typed)


GOOD = entry("query", [1, 1, 6], fp32_contents=[0.5] * 6)
