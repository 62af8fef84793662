"""TIER 3: the Python client; NumPy arrays in and out.

    with Client("http://127.0.0.1:8000") as client:
        result = client.attend(query, causal=True)
        result.output, result.attention_weights

`client.session()` decodes row by row with a KV cache in the service. `AsyncClient` is the same with `async with` and `await`.
`capture(model, inputs, client)` runs a model and puts its attention layers with their inputs into the service;
`interventions(model, client)` runs it with changes of its heads. `attend.client.remote` has a
torch module that computes in a service, `attend.client.transformers` an attention implementation for models of transformers. These two and
`recording.py` import torch, no other module does.
"""

from attend.client.captures import Capture, CapturedLayer, capture
from attend.client.client import AsyncClient, Client
from attend.client.connection import Retries
from attend.client.interventions import Change, Interventions, Run, interventions
from attend.client.responses import AnalysisResult, AttendResult, Picture, TopWeights, WordsResult
from attend.client.sessions import AsyncSession, Session
from attend.errors import BadReply, LengthMismatch, ReplyLost, TimedOut, Unreachable, Untrusted

__all__ = [
    "AnalysisResult",
    "AsyncClient",
    "AsyncSession",
    "AttendResult",
    "BadReply",
    "Capture",
    "CapturedLayer",
    "Change",
    "Client",
    "Interventions",
    "LengthMismatch",
    "Picture",
    "ReplyLost",
    "Retries",
    "Run",
    "Session",
    "TimedOut",
    "TopWeights",
    "Unreachable",
    "Untrusted",
    "WordsResult",
    "capture",
    "interventions",
]
