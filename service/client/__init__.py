"""FLOOR 3: the Python client; NumPy arrays in and out.

    with Client("http://127.0.0.1:8000") as client:
        result = client.attend(query, causal=True)
        result.output, result.attention_weights

`client.session()` decodes row by row with a KV cache in the service. `AsyncClient` is the same with `async with` and `await`.
`merge` joins the results of several services over parts of the keys.
`service.client.remote` has a torch module that computes in a service, `service.client.transformers` an attention implementation for models
of transformers. No other module imports torch.
"""

from service.client.client import AsyncClient, Client
from service.client.connection import Retries
from service.client.merge import merge
from service.client.responses import AnalysisResult, AttendResult, Picture, TopWeights, WordsResult
from service.client.sessions import AsyncSession, Session
from service.errors import BadReply, LengthMismatch, ReplyLost, TimedOut, Unreachable, Untrusted

__all__ = [
    "AnalysisResult",
    "AsyncClient",
    "AsyncSession",
    "AttendResult",
    "BadReply",
    "Client",
    "LengthMismatch",
    "Picture",
    "ReplyLost",
    "Retries",
    "Session",
    "TimedOut",
    "TopWeights",
    "Unreachable",
    "Untrusted",
    "WordsResult",
    "merge",
]
