"""A first version in FastAPI: nested lists in, `tolist` out."""

import torch
from fastapi import FastAPI
from layer import attend
from pydantic import BaseModel

app = FastAPI()
Sequence = list[list[list[float]]]


class Request(BaseModel):
    query: Sequence
    key: Sequence
    value: Sequence


class Reply(BaseModel):
    output: Sequence
    attention_weights: list[Sequence]


@app.post("/attend")
def post(request: Request) -> Reply:
    output, weights = attend(torch.tensor(request.query), torch.tensor(request.key), torch.tensor(request.value))
    return Reply(output=output.tolist(), attention_weights=weights.tolist())
