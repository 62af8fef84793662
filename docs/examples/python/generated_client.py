"""Calls a server by the client that openapi-python-client made of openapi/openapi.json: `python generated_client.py http://127.0.0.1:8000`."""

import math
import sys

from attend_client import Client
from attend_client.api.attend import analysis, attend, figure
from attend_client.api.layers import get_layer
from attend_client.models import AnalysisRequest, AttendReply, AttendRequest, FigureRequest, ProblemDocument

client = Client(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
query = [[math.sin(row + column) for column in range(64)] for row in range(3)]

reply = attend.sync(client=client, body=AttendRequest(query=query, attend_mask=[[1, 0, 0], [1, 1, 0], [1, 1, 1]]))
assert isinstance(reply, AttendReply) and reply.attention_weights[0][0] == [1, 0, 0]
assert get_layer.sync(reply.layer.name, client=client).fingerprint == reply.layer.fingerprint

refusal = attend.sync(client=client, body=AttendRequest(query=[[1]]))
assert isinstance(refusal, ProblemDocument) and refusal.errors[0].at == "/query"

entropy = analysis.sync(client=client, body=AnalysisRequest(query=query)).metrics["entropy"]
picture = figure.sync(client=client, body=FigureRequest(query=query)).payload.read()
assert picture.startswith(b"\x89PNG")
print(reply.layer.name, len(reply.output), len(entropy), len(picture))
