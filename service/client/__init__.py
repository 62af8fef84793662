"""FLOOR 3: the service from Python, numpy in and numpy out.

    with Client("http://127.0.0.1:8000") as client:
        result = client.attend(query, causal=True)
        result.output, result.attention_weights

`AsyncClient` is the same with `async with` and `await`. `merge` joins the answers of several services, each of which holds some of the
keys. `service.client.remote` has a torch module that computes here; nothing else loads torch, and nothing fastapi.
"""

from service.client.async_client import AsyncClient
from service.client.client import Client
from service.client.merge import merge
from service.client.result import AnalysisResult, AttendResult, TopWeights
from service.client.retries import Retries
from service.errors import BadReply, TimedOut, Unreachable, Untrusted

__all__ = [
    "AnalysisResult",
    "AsyncClient",
    "AttendResult",
    "BadReply",
    "Client",
    "Retries",
    "TimedOut",
    "TopWeights",
    "Unreachable",
    "Untrusted",
    "merge",
]
