"""Exports and imports of caches: what is computed for a caller that left, before admission, and files of the first version."""

import gzip
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from attend.errors import AttendError, CallerGone, MalformedBody, OutOfMemory, Overloaded
from attend.serving.byte_budget import ByteBudget, Lease
from attend.serving.requests import Request
from attend.serving.service import open_service
from attend.serving.sessions import transfer
from attend.serving.sessions.ids import new_process
from attend.serving.sessions.registry import SessionRegistry
from attend.spec import LayerSpec
from attend.wire.negotiation import CODECS, SAFETENSORS
from attend.wire.safetensors import write_tensors
from attend.wire.schemas.sessions import PostSession
from support.scheduler import run

GOLDEN = Path(__file__).parents[2] / "golden" / "sessions"
SPEC = LayerSpec(d_model=6, num_heads=3, seed=1)
ROW_BYTES, MEMORY = 48, 1 << 20


def body_of(fingerprint: str, rows: int, announced: int | None = None) -> bytes:
    """An exported file of so many rows, whose metadata announce others if given."""
    arrays = {name: np.zeros((3, rows, 2), np.float32) for name in ("key", "value")}
    metadata = {"fingerprint": fingerprint, "length": str(rows if announced is None else announced), "first": "0"}
    return b"".join(map(bytes, write_tensors(arrays, metadata)))


def crowded_lease(size: int) -> Lease:
    """A lease of a budget of which another caller uses so much that `size` bytes find no room."""
    budget = ByteBudget(3 * size)
    Lease(budget, "another").add(size)
    Lease(budget, "third").add(size)
    return Lease(budget, "one")


class Transfers:
    """A service with a session, and the names of the functions of safetensors that its exports and imports have called."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.service = open_service("cpu")
        self.service.registry.put(self.service.registry.make("default", SPEC))
        self.sessions = SessionRegistry(self.service.registry, self.service.metrics, MEMORY, new_process("one"), several_owners=False)
        self.session, self.ran = self.sessions.create(PostSession(), ""), list[str]()
        for name in ("write_tensors", "read_header", "read_tensors"):
            patch.setattr(transfer, name, self._recorded(name, getattr(transfer, name)))

    def _recorded(self, name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            self.ran.append(name)
            return function(*args)

        return call

    async def put(self, body: bytes, coding: str = "", **fields: Any) -> None:
        request = Request(body, codec=CODECS[SAFETENSORS], coding=coding, **fields)
        await transfer.import_cache(self.service, self.sessions, self.session.id, "", request)

    async def get(self, **fields: Any) -> bytes:
        pieces = await transfer.export_cache(self.service, self.sessions, self.session.id, "", Request(b"", **fields))
        return b"".join(map(bytes, pieces))

    def close(self) -> None:
        self.sessions.close()
        self.service.close()


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"gone": lambda: True}, CallerGone),
        ({"lease": crowded_lease(64 * ROW_BYTES)}, Overloaded),
    ],
)
def test_an_export_that_is_not_admitted_copies_nothing(monkeypatch: pytest.MonkeyPatch, fields: Any, error: type[AttendError]) -> None:
    async def check() -> None:
        transfers = Transfers(monkeypatch)
        await transfers.put(body_of(transfers.session.layer.fingerprint, 64))
        transfers.ran.clear()
        with pytest.raises(error):
            await transfers.get(**fields)
        assert transfers.ran == [] and not transfers.session.lock.locked()
        lease = Lease(ByteBudget(1 << 20), "one")
        assert len(await transfers.get(lease=lease)) > 64 * ROW_BYTES == lease.held
        transfers.close()

    run(check())


@pytest.mark.parametrize("error", [OutOfMemory, Overloaded, CallerGone])
def test_a_compressed_import_that_is_not_admitted_stays_compressed(monkeypatch: pytest.MonkeyPatch, error: type[AttendError]) -> None:
    """Beyond its header, which says how many bytes and rows there will be."""

    async def check() -> None:
        transfers = Transfers(monkeypatch)
        rows = 2 * MEMORY // ROW_BYTES if error is OutOfMemory else 64
        lease = crowded_lease(64 * ROW_BYTES) if error is Overloaded else Lease(ByteBudget(1 << 30), "one")
        departed = iter([False, False, True])
        packed = gzip.compress(body_of(transfers.session.layer.fingerprint, rows))
        fields: Any = {"gone": lambda: next(departed, True)} if error is CallerGone else {"lease": lease}
        with pytest.raises(error):
            await transfers.put(packed, "gzip", **fields)
        assert transfers.ran == ["read_header"]
        assert transfers.session.length == 0 and transfers.sessions.pool.used == 0
        await transfers.put(gzip.compress(body_of(transfers.session.layer.fingerprint, 7)), "gzip")
        assert transfers.session.length == 7
        transfers.close()

    run(check())


def test_a_file_with_other_bytes_than_its_header_announces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        transfers = Transfers(monkeypatch)
        body = body_of(transfers.session.layer.fingerprint, 5)
        for wrong in (body + b"\0", body[:-1]):
            for packed, coding in ((wrong, ""), (gzip.compress(wrong), "gzip")):
                with pytest.raises(MalformedBody, match=r"240 bytes of tensor data|bytes within"):
                    await transfers.put(packed, coding)
        assert transfers.session.length == 0 and transfers.sessions.pool.used == 0
        transfers.close()

    run(check())


@pytest.mark.parametrize("name", [path.stem for path in sorted(GOLDEN.glob("*.safetensors"))])
def test_a_cache_of_the_first_version_is_imported(http: httpx.Client, name: str) -> None:
    """The next step gives the output that the first version gave."""
    case = json.loads((GOLDEN / f"{name}.json").read_text())
    layer = f"golden-{name}"
    assert http.put(f"/layers/{layer}", json={"spec": case["spec"]}).status_code in (200, 201)
    session = http.post("/sessions", json={"layer": layer}).json()["id"]
    file = (GOLDEN / f"{name}.safetensors").read_bytes()
    put = http.put(f"/sessions/{session}/cache", content=file, headers={"content-type": SAFETENSORS})
    assert put.status_code == 200, put.text
    assert put.json()["length"] == 22
    assert http.get(f"/sessions/{session}/cache").content == file
    body = orjson.dumps({"query": case["query"], "causal": True, "outputs": ["output"]})
    output = np.array(http.post(f"/sessions/{session}/attend", content=body).json()["output"])
    tolerance = 2.0**-7 if case["spec"].get("dtype") == "bfloat16" else 1e-6
    np.testing.assert_allclose(output, case["output"], rtol=0, atol=tolerance * np.abs(case["output"]).max())
    http.delete(f"/sessions/{session}")
    http.delete(f"/layers/{layer}")
