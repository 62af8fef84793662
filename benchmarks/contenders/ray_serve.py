"""Ray Serve behind FastAPI, one replica."""

import os
import signal
import sys
from pathlib import Path

import ray
from fastapi import FastAPI
from pydantic import BaseModel
from ray import serve

FOLDER = str(Path(__file__).parent)
app = FastAPI()
Sequence = list[list[list[float]]]


class Request(BaseModel):
    query: Sequence
    key: Sequence
    value: Sequence


@serve.deployment
@serve.ingress(app)
class Attention:
    def __init__(self):
        sys.path.insert(0, FOLDER)
        import layer

        self.layer = layer

    @app.post("/attend")
    def post(self, request: Request):
        tensor = self.layer.torch.tensor
        output, weights = self.layer.attend(tensor(request.query), tensor(request.key), tensor(request.value))
        return {"output": output.tolist(), "attention_weights": weights.tolist()}


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    serve.start(http_options={"host": "127.0.0.1", "port": int(os.environ["PORT"])})
    serve.run(Attention.bind())
    signal.pause()
