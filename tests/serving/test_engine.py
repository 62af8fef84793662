"""The engine: a finished request leaves nothing in memory."""

import gc
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save
from support.scheduler import REAL, run

from service.attention.call import Call
from service.errors import AttendError
from service.serving.admission import ServingLimits
from service.serving.batching import Entry
from service.serving.codec_pool import HEAVY_BYTES, Job
from service.serving.engine import ATTEND
from service.serving.requests import RawRequest
from service.serving.service import open_service
from service.wire.limits import WireLimits
from service.wire.negotiation import CODECS, JSON, SAFETENSORS

KINDS = {
    "computed in a thread": (SAFETENSORS, {}, False),
    "decoded in a thread": (JSON, {}, False),
    "an unknown layer": (JSON, {"layer": "unknown"}, True),
    "an invalid field": (SAFETENSORS, {"unknown": 1}, True),
    "an invalid shape": (JSON, {"attend_keys": [1, 1]}, True),
    "a deadline that has passed": (SAFETENSORS, {}, True),
}


def requests_in_memory() -> list[Any]:
    return [found for found in gc.get_objects() if type(found) in (Call, RawRequest, Job, Entry)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_request_leaves_no_reference_cycle(kind: str) -> None:
    """A reference cycle would keep the tensors, megabytes for each request, until the next collection."""
    media, members, is_refused = KINDS[kind]
    query = np.random.default_rng(0).standard_normal((5, 509, 6)).astype("f4")
    if media == JSON:
        body = json.dumps({"layer": "layer", "query": query.tolist(), **members}).encode().ljust(HEAVY_BYTES)
    else:
        body = save({"query": query}, {"request": json.dumps({"layer": "layer", **members})})

    async def test() -> None:
        service = open_service("cpu", WireLimits(), ServingLimits())
        service.registry.put(replace(REAL, name="layer"))
        for _ in range(3):
            deadline = service.clock() if kind == "a deadline that has passed" else None
            try:
                await service.engine.answer(RawRequest(body, CODECS[media], "", CODECS[media], "", deadline=deadline), ATTEND)
                assert not is_refused
            except AttendError:
                assert is_refused
        service.close()

    gc.collect()
    gc.disable()
    try:
        earlier = requests_in_memory()  # of other tests
        run(test())
        cached = [known.call for known in REAL.validated._results.values()]  # calls without numbers
        left = [found for found in requests_in_memory() if all(found is not x for x in (*earlier, *cached))]
    finally:
        gc.enable()
    assert not left
