"""MLServer's codecs and its command `mlserver infer` against the servers named on the command line: http://host:port host:port.

It needs an environment of its own, since it installs a whole server. Its codecs send `content_type` for every tensor and the request.
"""

import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import grpc
import numpy as np
from mlserver.codecs import NumpyCodec, NumpyRequestCodec
from mlserver.grpc.converters import ModelInferRequestConverter, ModelInferResponseConverter
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub
from mlserver.types import InferenceRequest, InferenceResponse, Parameters, RequestOutput

QUERY = np.random.default_rng(5).standard_normal((2, 3, 64)).astype(np.float32)
NAMES = ("output", "attention_weights")


def request() -> InferenceRequest:
    """A request with everything that the codecs send."""
    return InferenceRequest(
        inputs=[NumpyCodec.encode_input("query", QUERY)],
        outputs=[RequestOutput(name=name, parameters=Parameters(content_type="np")) for name in NAMES],
        parameters=Parameters(content_type=NumpyRequestCodec.ContentType),
    )


def agree(reply: InferenceResponse, want: dict[str, object]) -> None:
    assert [output.name for output in reply.outputs] == list(NAMES)
    for output in reply.outputs:
        np.testing.assert_allclose(NumpyCodec.decode_output(output), want[output.name], rtol=0, atol=1e-6)


def command(url: str, binary: list[str], want: dict[str, object]) -> None:
    """`mlserver infer`, of three requests in a file."""
    with tempfile.TemporaryDirectory() as folder:
        given, got = Path(folder) / "requests", Path(folder) / "replies"
        given.write_text(f"{request().model_dump_json()}\n" * 3)
        tool = Path(sys.executable).with_name("mlserver")
        flags = ["--url", url.removeprefix("http://"), "--model-name", "default", "--input-data-path", given, "--output-data-path", got]
        subprocess.run([tool, "infer", *flags, *binary], check=True)
        replies = got.read_text().splitlines()
    assert len(replies) == 3
    for reply in replies:
        assert "error" not in json.loads(reply), reply
        agree(InferenceResponse.model_validate_json(reply), want)


def post(url: str, body: str) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})) as reply:
        return reply.read()


def check(url: str, address: str) -> None:
    want = json.loads(post(f"{url}/attend", json.dumps({"query": QUERY.tolist()})))
    agree(InferenceResponse.model_validate_json(post(f"{url}/v2/models/default/infer", request().model_dump_json())), want)
    with grpc.insecure_channel(address) as channel:
        message = ModelInferRequestConverter.from_types(request(), model_name="default", model_version="")
        agree(ModelInferResponseConverter.to_types(GRPCInferenceServiceStub(channel).ModelInfer(message)), want)
    for binary in ([], ["--binary-data"]):
        command(url, binary, want)


check(*sys.argv[1:])
print("MLServer's codecs and command: good")
