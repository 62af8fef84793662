"""Any order of calls to sessions over HTTP, compared with a model that stores the rows and calls the reference."""

import json
from typing import Any

import httpx
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from safetensors.numpy import load

from attend.check.random_cases import Case
from attend.cli.server_check import compare_output, largest_score
from attend.spec import LayerSpec
from support.decoding import Sequence
from support.framework_cases import array
from support.layers import json_body

SAFETENSORS = "application/vnd.safetensors"
SPECS: tuple[dict[str, Any], ...] = (
    {"num_kv_heads": 1, "rope": {}},
    {"window": {"left": 5}, "sinks": True, "alibi": True},
    {"chunk_size": 7, "dtype": "float32", "qk_norm": {"kind": "rms"}},
    {"latent": {"key_value_rank": 5, "rope_key_dim": 2}, "rope": {"dims": 2}},
    {"differential": {"lambda_init": 0.3}, "num_heads": 2, "output_gate": {}},
    {
        "indexer": {"num_heads": 2, "head_dim": 5, "top_k": 3},
        "rope": {},
        "latent": {"key_value_rank": 5, "rope_key_dim": 2, "query_rank": 3},
    },
    {"indexer": {"num_heads": 1, "head_dim": 5, "top_k": 2}, "dtype": "float32", "window": {"left": 9}},
)


class Calls(RuleBasedStateMachine):
    """Up to four sessions of one layer. A `Sequence` of each has its rows; its own cache is not used."""

    http: httpx.Client

    @initialize(spec=st.sampled_from(SPECS))
    def put_layer(self, spec: dict[str, Any]) -> None:
        fields = {"d_model": 12, "num_heads": 3, "dtype": "float64", **spec}
        rng = np.random.default_rng(len(str(spec)))
        weights = {name: rng.standard_normal(shape) / 2 for name, shape in LayerSpec(**fields).weight_shapes().items()}
        made = self.http.put("/layers/states", json={"spec": fields, "weights": {name: x.tolist() for name, x in weights.items()}})
        assert made.is_success, made.text
        dtype = fields["dtype"]
        self.case = Case(LayerSpec(**fields), {}, {name: x.astype(dtype) for name, x in weights.items()})
        self.models: dict[str, Sequence] = {}
        self.ended: list[str] = []
        self.create()

    @rule()
    def create(self) -> None:
        if len(self.models) < 4:
            reply = self.http.post("/sessions", json={"layer": "states"})
            assert reply.status_code == 201 and reply.json()["length"] == 0
            self.models[reply.json()["id"]] = Sequence(self.case)

    def one(self, data: st.DataObject) -> tuple[str, Sequence]:
        session = data.draw(st.sampled_from(list(self.models)))  # in the order of creation: ids are random
        return session, self.models[session]

    @precondition(lambda self: self.models)
    @rule(data=st.data(), count=st.sampled_from([1, 1, 2, 9]), seed=st.integers(0, 999), appends=st.booleans(), binary=st.booleans())
    def attend(self, data: st.DataObject, count: int, seed: int, appends: bool, binary: bool) -> None:
        """A step with or without `append`; a wrong `expected_length` is 412 and appends nothing."""
        session, model = self.one(data)
        start, rng = rows(model), np.random.default_rng(seed)
        query = rng.standard_normal((count, 12)).astype(self.case.spec.dtype)
        appends |= not start
        expected = data.draw(st.sampled_from([None, start, start + 1]))
        outputs = data.draw(st.sampled_from([["output"], model.outputs]))
        call = {"query": query, "causal": appends or None, "query_offset": None if appends else start - 1, "append": appends}
        call = {name: x for name, x in call.items() if x is not None}
        reply = self.http.post(
            f"/sessions/{session}/attend",
            json={**json_body(call), "outputs": outputs, "expected_length": expected, "reply": {"form": "base64", "datatype": "FP64"}},
            headers={"accept": SAFETENSORS} if binary else {},
        )
        if expected == start + 1:
            assert reply.status_code == 412 and f"the length of the session is {start}" in reply.json()["detail"]
            return
        assert reply.status_code == 200, reply.text
        if appends:
            model.keep(call)
        self.check(reply, model, call, start, outputs, binary)

    def check(self, reply: httpx.Response, model: Sequence, call: dict[str, Any], start: int, outputs: list[str], binary: bool) -> None:
        """Length and outputs."""
        if binary:
            tensors = load(reply.content)
            size = int.from_bytes(reply.content[:8], "little")
            session = json.loads(json.loads(reply.content[8 : 8 + size])["__metadata__"]["reply"])["session"]
        else:
            tensors, session = {name: array(reply.json()[name]) for name in outputs}, reply.json()["session"]
        assert session["length"] == rows(model)
        reference = model.expected(call, start)
        largest = largest_score(Case(model.spec, {}), reference)
        for name in outputs:
            error = compare_output(name, np.asarray(getattr(reference, name)), tensors[name], model.spec, largest)
            assert error.agrees, (error, model.spec)

    @precondition(lambda self: self.models)
    @rule(data=st.data(), is_fork=st.booleans())
    def fork_or_roll_back(self, data: st.DataObject, is_fork: bool) -> None:
        """To any length, or one too many."""
        session, model = self.one(data)
        length = data.draw(st.integers(0, rows(model) + 1))
        if is_fork and len(self.models) == 4:
            return
        method, path = ("POST", "/fork") if is_fork else ("PATCH", "")
        reply = self.http.request(method, f"/sessions/{session}{path}", json={"length": length})
        if length > rows(model):
            assert reply.status_code == 422 and f"at most {rows(model)}" in reply.json()["detail"]
            return
        assert reply.is_success and reply.json()["length"] == length
        if is_fork:
            model = self.models[reply.json()["id"]] = Sequence(self.case)
            model.rows = dict(self.models[session].rows)
            model.key_positions = self.models[session].key_positions
        model.rows = {name: x[:length] for name, x in model.rows.items()}
        model.key_positions = model.key_positions[:length]

    @precondition(lambda self: len(self.models) > 1)
    @rule(data=st.data())
    def copy_through_a_file(self, data: st.DataObject) -> None:
        """The rows of one session replace those of another; the same bytes come out again."""
        (one, model), (other, _) = self.one(data), self.one(data)
        file = self.http.get(f"/sessions/{one}/cache").content
        reply = self.http.put(f"/sessions/{other}/cache", content=file, headers={"content-type": SAFETENSORS})
        assert reply.status_code == 200 and reply.json()["length"] == rows(model)
        assert self.http.get(f"/sessions/{other}/cache").content == file
        self.models[other].rows, self.models[other].key_positions = dict(model.rows), model.key_positions

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        session, _ = self.one(data)
        assert self.http.delete(f"/sessions/{session}").status_code == 204
        del self.models[session]
        self.ended.append(session)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def use_one_that_has_ended(self, data: st.DataObject) -> None:
        reply = self.http.get(f"/sessions/{data.draw(st.sampled_from(self.ended))}")
        assert reply.status_code == 410 and "it was deleted" in reply.json()["detail"]

    def teardown(self) -> None:
        for session in getattr(self, "models", {}):
            assert self.http.delete(f"/sessions/{session}").status_code == 204
        listed = [document["id"] for document in self.http.get("/sessions").json()["sessions"]]
        assert not set(listed) & {*getattr(self, "models", {}), *getattr(self, "ended", [])}


def rows(model: Sequence) -> int:
    return len(model.rows["key"])


def test_any_order_of_calls_agrees_with_the_reference(http: httpx.Client) -> None:
    class OnThisServer(Calls):
        pass

    OnThisServer.http = http
    run_state_machine_as_test(OnThisServer)  # type: ignore[no-untyped-call]
