"""FLOOR 3: the service from Python, numpy in and numpy out.

    with Client("http://127.0.0.1:8000") as client:
        result = client.attend(query, causal=True)
        result.output, result.attention_weights

`merge` joins the answers of several services, each of which holds some of the keys. Loads neither torch nor fastapi.
"""

from service.client.client import Client
from service.client.failures import BadReply, TimedOut, Unreachable
from service.client.merge import merge
from service.client.result import AnalysisResult, AttendResult, TopWeights

__all__ = ["AnalysisResult", "AttendResult", "BadReply", "Client", "TimedOut", "TopWeights", "Unreachable", "merge"]
