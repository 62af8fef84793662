"""One request in every form that the service takes, and its reply as arrays."""

import base64
import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import ml_dtypes
import numpy as np
from safetensors import deserialize
from safetensors.numpy import save
from tritonclient.grpc import service_pb2_grpc

from support.grpc_calls import address_of, entry, request
from support.server import Server
from support.v2 import DTYPES, NAMES, described, in_bytes, loads_strictly, read

Array = np.ndarray[Any, Any]
FORMS = ("json", "flat", "safetensors", "v2 json", "v2 bytes", "grpc typed", "grpc raw")
SAFETENSORS = "application/vnd.safetensors"
OF_SAFETENSORS = {"F16": "FP16", "BF16": "BF16", "F32": "FP32", "F64": "FP64", "I64": "INT64"}
PACKERS = {"gzip": gzip.compress, "deflate": zlib.compress}
GRPC_CODINGS = {"": grpc.Compression.NoCompression, "gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}
CONTENTS = {"BOOL": "bool", "INT64": "int64", "UINT64": "uint64", "FP32": "fp32", "FP64": "fp64"}


@dataclass
class Reply:
    arrays: dict[str, Array]  # of `top_k`, those of NAME.keys and NAME.values
    fully_masked_rows: int
    fingerprint: str


class Refused(Exception):
    """The text of a refusal."""


class Sender:
    """Sends requests in one form to a server with HTTP and gRPC. Form "json" has nested lists, and flat ones in its reply; form "flat" has
    base64 in its reply. With `coding`, bodies are compressed, those of HTTP in both directions.
    """

    def __init__(self, form: str, server: Server, http: httpx.Client) -> None:
        self.form, self.http, self.address, self.coding = form, http, address_of(server), ""

    def __call__(self, layer: str, tensors: Mapping[str, Array], outputs: list[str], **members: Any) -> Reply:
        """The reply to a request with these tensors and other fields. Raises Refused."""
        if self.form.startswith(("v2", "grpc")):  # offsets as the column that the metadata announces, lengths as [b]
            columns = {name: array[:, None] if name == "query_offset" else array for name, array in tensors.items()}
            return (self._v2 if self.form.startswith("v2") else self._grpc)(layer, columns, outputs, members)
        common = {"layer": layer, "outputs": outputs, **members}
        if self.form == "safetensors":
            body = save({name: np.ascontiguousarray(array) for name, array in tensors.items()}, {"request": json.dumps(common)})
            answer = self._post("/attend", body, {"Content-Type": SAFETENSORS, "Accept": SAFETENSORS})
            size = int.from_bytes(answer.content[:8], "little")
            document = json.loads(json.loads(answer.content[8 : 8 + size])["__metadata__"]["reply"])
            arrays = _arrays(answer.content)
        else:
            nested = self.form == "json"
            lists = {
                name: _list(array) if (nested and array.size) or name == "query_offset" else _flat(array) for name, array in tensors.items()
            }
            common["reply"] = {**members.get("reply", {}), "form": "flat" if nested else "base64"}
            answer = self._post("/attend", json.dumps({**common, **lists}).encode(), {"Content-Type": "application/json"})
            document = loads_strictly(answer.content)
            arrays = {}
            for name in outputs:
                parts = {name: document[name]} if "shape" in document[name] else {f"{name}.{n}": x for n, x in document[name].items()}
                arrays |= {part: _array(tensor) for part, tensor in parts.items()}
        return Reply(arrays, document["fully_masked_rows"], document["layer"]["fingerprint"])

    def _post(self, path: str, body: bytes, headers: Mapping[str, str]) -> httpx.Response:
        """The reply to a body, compressed if `coding` is set."""
        if self.coding:
            body, headers = PACKERS[self.coding](body), {**headers, "Content-Encoding": self.coding, "Accept-Encoding": self.coding}
        answer = self.http.post(path, content=body, headers=headers)
        if answer.status_code != 200:
            raise Refused(answer.text)
        assert answer.headers.get("content-encoding", "") == self.coding
        return answer

    def _v2(self, layer: str, tensors: Mapping[str, Array], outputs: list[str], members: Mapping[str, Any]) -> Reply:
        rest: dict[str, Any] = {"parameters": _parameters(members), "outputs": [{"name": name} for name in outputs]}
        path = f"/v2/models/{layer}/infer"
        if self.form == "v2 bytes":
            rest["parameters"]["binary_data_output"] = True
            body, headers = in_bytes(rest, **tensors)
            reply = read(self._post(path, body, headers))
            assert reply.binary == reply.arrays.keys()
        else:
            inputs = [{**described(name, array), "data": _list(array.ravel())} for name, array in tensors.items()]
            reply = read(self._post(path, json.dumps({"inputs": inputs, **rest}).encode(), {}))
            assert not reply.binary
        parameters = reply.document["parameters"]
        return Reply(reply.arrays, parameters["fully_masked_rows"], parameters["fingerprint"])

    def _grpc(self, layer: str, tensors: Mapping[str, Array], outputs: list[str], members: Mapping[str, Any]) -> Reply:
        kinds = {str: "string_param", bool: "bool_param", int: "int64_param", float: "double_param"}
        message = request(layer)
        for name, value in _parameters(members).items():
            setattr(message.parameters[name], kinds[type(value)], value)
        typed = self.form == "grpc typed" and all(NAMES[array.dtype] not in ("FP16", "BF16") for array in tensors.values())  # have no field
        for name, array in tensors.items():
            datatype = NAMES[array.dtype]
            field = f"{CONTENTS.get(datatype, 'uint' if datatype.startswith('U') else 'int')}_contents"
            contents = {field: array.ravel().tolist()} if typed else {}
            message.inputs.append(entry(name, list(array.shape), datatype, **contents))
            if not typed:
                message.raw_input_contents.append(array.tobytes())
        for name in outputs:
            message.outputs.add(name=name)
        with grpc.insecure_channel(self.address) as channel:
            infer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
            try:
                reply = infer(message, timeout=60, compression=GRPC_CODINGS[self.coding])
            except grpc.RpcError as error:
                raise Refused(error.details()) from error
        assert (reply.model_name, reply.model_version) == (layer, "1")
        arrays = {
            output.name: np.frombuffer(piece, DTYPES[output.datatype]).reshape(output.shape)
            for output, piece in zip(reply.outputs, reply.raw_output_contents, strict=True)
        }
        return Reply(arrays, reply.parameters["fully_masked_rows"].int64_param, reply.parameters["fingerprint"].string_param)


def weights_of(http: httpx.Client, layer: str) -> dict[str, Array]:
    """The weights of a layer, in float64."""
    return {name: array.astype(np.float64) for name, array in _arrays(http.get(f"/layers/{layer}/weights").content).items()}


def step_of(array: Array) -> float:
    """The distance between 1 and the next number of the array's datatype."""
    return float(ml_dtypes.finfo(array.dtype).eps)


def _list(array: Array) -> Any:
    """The array as nested lists, -inf as its word."""

    def plain(x: Any) -> Any:
        return [plain(item) for item in x] if isinstance(x, list) else "-inf" if x == -np.inf else x

    return plain(array.tolist())


def _flat(array: Array) -> dict[str, Any]:
    return {"shape": list(array.shape), "datatype": NAMES[array.dtype], "data": _list(array.ravel())}


def _parameters(members: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as parameters of the Open Inference Protocol: those with members of their own are text."""
    return {name: json.dumps(value) if isinstance(value, dict | list) else value for name, value in members.items()}


def _arrays(file: bytes) -> dict[str, Array]:
    """The tensors of a safetensors file."""
    return {
        name: np.frombuffer(part["data"], DTYPES[OF_SAFETENSORS[part["dtype"]]]).reshape(part["shape"]) for name, part in deserialize(file)
    }


def _array(tensor: dict[str, Any]) -> Array:
    """The tensor of a reply in the flat form or in base64. Null is NaN."""
    dtype = np.dtype(DTYPES[tensor["datatype"]])
    if "base64" in tensor:
        return np.frombuffer(base64.b64decode(tensor["base64"], validate=True), dtype).reshape(tensor["shape"])
    return np.array(tensor["data"], np.float64).astype(dtype).reshape(tensor["shape"])
