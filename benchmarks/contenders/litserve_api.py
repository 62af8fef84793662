"""LitServe, one worker."""

import os

import litserve
import torch
from layer import attend


class Attention(litserve.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return [torch.tensor(request[name]) for name in ("query", "key", "value")]

    def predict(self, tensors):
        return attend(*tensors)

    def encode_response(self, results):
        output, weights = results
        return {"output": output.tolist(), "attention_weights": weights.tolist()}


if __name__ == "__main__":
    server = litserve.LitServer(Attention(), accelerator="cpu", workers_per_device=1)
    server.run(port=int(os.environ["PORT"]), num_api_servers=1, generate_client_file=False)
