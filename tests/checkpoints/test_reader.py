"""Refusals of checkpoints name the tensor, the field of the spec, the layout or the prefix, and what was expected there."""

import numpy as np
import pytest

from attend.checkpoints import read_layer
from attend.checkpoints.families import FAMILIES
from attend.checkpoints.layouts import LAYOUTS, NAMES
from attend.errors import InvalidRequest
from support.checkpoints import draw

NUM_HEADS = {"num_heads": 3}


def bert(layers=1, **changes):
    """Layers of 3 heads over width 15; `changes` replace or, if None, remove tensors of layer 0."""
    w = {}
    for i in range(layers):
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            w[f"encoder.layer.{i}.attention.{name}.weight"] = draw(i, 15, 15)
            w[f"encoder.layer.{i}.attention.{name}.bias"] = draw(i, 15)
    w |= {f"encoder.layer.0.attention.{name.replace('__', '.')}": x for name, x in changes.items()}
    return {name: x for name, x in w.items() if x is not None}


def llama(**changes):
    w = {"q_proj.weight": draw(1, 24, 7), "k_proj.weight": draw(2, 12, 7), "v_proj.weight": draw(3, 12, 7), "o_proj.weight": draw(4, 7, 24)}
    w |= {name.replace("__", "."): x for name, x in changes.items()}
    return {f"layers.0.self_attn.{name}": x for name, x in w.items() if x is not None}


def keras(**changes):
    w = {"query/kernel": draw(1, 5, 3, 2), "key/kernel": draw(2, 5, 3, 2), "value/kernel": draw(3, 5, 3, 7)}
    w |= {"attention_output/kernel": draw(4, 3, 7, 5)} | {name.replace("__", "/"): x for name, x in changes.items()}
    return {f"mha/{name}": x for name, x in w.items() if x is not None}


def torch_mha(**changes):
    w = {"in_proj_weight": draw(1, 45, 15), "in_proj_bias": draw(2, 45), "out_proj.weight": draw(3, 15, 15), "out_proj.bias": draw(4, 15)}
    return {name: x for name, x in (w | changes).items() if x is not None}


def gpt2(packed):
    w = {"c_attn.weight": packed, "c_attn.bias": draw(2, 45), "c_proj.weight": draw(3, 15, 15), "c_proj.bias": draw(4, 15)}
    return {f"h.0.attn.{name}": x for name, x in w.items()}


def fused(rows=45):
    w = {"query_key_value.weight": draw(1, rows, 15), "query_key_value.bias": draw(2, rows)}
    return w | {"dense.weight": draw(3, 15, 15), "dense.bias": draw(4, 15)}


def ours(**more):
    w = {f"{name}.weight": draw(1, 15, 15) for name in ("query", "key", "value", "output")}
    return w | {name.replace("__", "."): draw(2, *shape) for name, shape in more.items()}


ROPE = {"num_heads": 4, "rope": {"theta": 10000.0, "interleaved": False}}
A0 = "/weights/encoder.layer.0.attention"
L0 = "/weights/layers.0.self_attn"
REFUSALS = {
    # which layer
    "unknown layout": (bert(), {"layout": "berd"}, "/layout", "attend, bart, bert, bloom"),
    "nothing that is known": ({"fc.weight": draw(1, 3, 3)}, {}, "/layout", "got tensors fc.weight"),
    "nothing at all": ({}, {}, "/layout", "got tensors none"),
    "only a part, without a layout": ({"dense.weight": draw(1, 3, 3)}, {}, "/layout", "nearest"),
    "another layout than given": (bert(), {"layout": "gpt2"}, "/layout", "got bert at encoder.layer.0.attention"),
    "several layers": (bert(12), {}, "/prefix", "encoder.layer.7.attention and 4 more, got none"),
    "several layers below a prefix": (bert(2), {"prefix": "encoder"}, "/prefix", 'encoder.layer.1.attention, got "encoder"'),
    "no such prefix": (bert(2), {"prefix": "encoder.layer.7"}, "/prefix", "encoder.layer.0.attention"),
    "a prefix that lacks its beginning": (bert(12), {"prefix": "layer.11"}, "/prefix", "expected one of encoder.layer.11.attention, "),
    "a prefix inside a layer": (bert(2), {"prefix": "encoder.layer.1.attention.self"}, "/prefix", "encoder.layer.1.attention"),
    "half a segment": (bert(12), {"prefix": "encoder.layer.1.atten"}, "/prefix", "encoder.layer.1.attention"),
    "names of several layouts": (fused(), {"spec": NUM_HEADS}, "/layout", "bloom"),
    "a bare llama or vit": ({name[19:]: x for name, x in llama().items()}, {"spec": ROPE}, "/layout", "llama ("),
    # missing, surplus and unknown tensors
    "missing weight": (bert(self__key__weight=None), {"spec": NUM_HEADS}, f"{A0}.self.key.weight", "got nothing"),
    "missing bias": (bert(self__value__bias=None), {"spec": NUM_HEADS}, f"{A0}.self.value.bias", "got nothing"),
    "missing of the given layout": (llama(o_proj__weight=None), {"layout": "llama"}, f"{L0}.o_proj.weight", "got nothing"),
    "a bias without the others": (
        llama(k_proj__bias=draw(1, 12)),
        {"spec": ROPE},
        f"{L0}.q_proj.bias",
        "as beside layers.0.self_attn.k_proj",
    ),
    "surplus": (bert(distance_embedding__weight=draw(1, 9, 5)), {"spec": NUM_HEADS}, f"{A0}.distance_embedding.weight", "only what"),
    "surplus norm of one side": (llama(q_norm__weight=draw(1, 6)), {"spec": ROPE}, f"{L0}.q_norm.weight", "only what"),
    "a gate": (keras(gate__kernel=draw(1, 5, 3, 7)), {}, "/weights/mha~1gate~1kernel", "only what"),
    "a bias of T5": (
        {f"SelfAttention.{x}.weight": draw(1, 6, 6) for x in "qkvo"} | {"SelfAttention.q.bias": draw(1, 6)},
        {},
        "/weights/SelfAttention.q.bias",
        "",
    ),
    "add_bias_kv": (torch_mha(bias_k=draw(1, 1, 1, 15), bias_v=draw(2, 1, 1, 15)), {"spec": NUM_HEADS}, "/weights/bias_k", "add_bias_kv"),
    # shapes and dtypes
    "a matrix of three axes": (bert(self__key__weight=draw(1, 3, 5, 15)), {"spec": NUM_HEADS}, f"{A0}.self.key.weight", "shape [out, in]"),
    "a kernel of two axes": (keras(query__kernel=draw(1, 5, 6)), {}, "/weights/mha~1query~1kernel", "shape [in, heads, dim]"),
    "a bias too short": (bert(self__key__bias=draw(1, 14)), {"spec": NUM_HEADS}, f"{A0}.self.key.bias", "shape [15]"),
    "keys of no head's width": (llama(k_proj__weight=draw(1, 13, 7)), {"spec": ROPE}, f"{L0}.k_proj.weight", "divides 4"),
    "three key heads for four": (llama(k_proj__weight=draw(1, 18, 7)), {"spec": ROPE}, f"{L0}.k_proj.weight", "divides 4"),
    "values of no width": (llama(v_proj__weight=draw(1, 13, 7)), {"spec": ROPE}, f"{L0}.v_proj.weight", "2 heads"),
    "an output transposed": (llama(o_proj__weight=draw(1, 24, 7)), {"spec": ROPE}, f"{L0}.o_proj.weight", "4 x 6"),
    "norms too wide": (
        llama(q_norm__weight=draw(1, 5), k_norm__weight=draw(2, 5)),
        {"spec": {"rope": ROPE["rope"]}},
        f"{L0}.q_norm.weight",
        "a width that divides 24",
    ),
    "norms of two widths": (
        llama(q_norm__weight=draw(1, 6), k_norm__weight=draw(2, 5)),
        {"spec": {"rope": ROPE["rope"]}},
        f"{L0}.k_norm.weight",
        "shape [6]",
    ),
    "too few sinks": (
        llama(sinks=draw(1, 3), q_norm__weight=draw(1, 6), k_norm__weight=draw(2, 6)),
        {"spec": {"rope": ROPE["rope"]}},
        f"{L0}.sinks",
        "shape [4]",
    ),
    "keras heads of two widths": (keras(key__kernel=draw(1, 5, 2, 3)), {}, "/weights/mha~1key~1kernel", "heads of width 2"),
    "keras heads that do not divide": (keras(key__kernel=draw(1, 5, 2, 2)), {}, "/weights/mha~1key~1kernel", "divides 3"),
    "keras values of fewer heads": (keras(value__kernel=draw(1, 5, 1, 7)), {}, "/weights/mha~1value~1kernel", "3 heads"),
    "keras output of other heads": (
        keras(attention_output__kernel=draw(1, 7, 3, 5)),
        {},
        "/weights/mha~1attention_output~1kernel",
        "[3, 7, out]",
    ),
    "packed, not three squares": (torch_mha(in_proj_weight=draw(1, 44, 15)), {"spec": NUM_HEADS}, "/weights/in_proj_weight", "[45, 15]"),
    "packed bias too short": (torch_mha(in_proj_bias=draw(1, 15)), {"spec": NUM_HEADS}, "/weights/in_proj_bias", "shape [45]"),
    "GPT-2 out of Linears": (gpt2(draw(1, 45, 15)), {"spec": NUM_HEADS}, "/weights/h.0.attn.c_attn.weight", "layout fused"),
    "per head, not divisible": (fused(44), {"layout": "bloom", "spec": NUM_HEADS}, "/weights/query_key_value.weight", "multiple of 9"),
    "fused, not divisible": (fused(44), {"layout": "fused", "spec": NUM_HEADS}, "/weights/query_key_value.weight", "multiple of 9"),
    "whole numbers": (bert(self__key__weight=np.ones((15, 15), np.int8)), {"spec": NUM_HEADS}, f"{A0}.self.key.weight", "floating-point"),
    "complex numbers": (bert(self__key__weight=np.ones((15, 15), complex)), {"spec": NUM_HEADS}, f"{A0}.self.key.weight", "got complex128"),
    "nothing in it": (bert(self__key__weight=draw(1, 0, 15)), {"spec": NUM_HEADS}, f"{A0}.self.key.weight", "got shape [0, 15]"),
    # the spec
    "no head count": (bert(), {}, "/spec/num_heads", "got nothing"),
    "no head count for rows": (fused(), {"layout": "bloom"}, "/spec/num_heads", "got nothing"),
    "heads that do not divide": (bert(), {"spec": {"num_heads": 4}}, "/spec/num_heads", "a divisor of 15"),
    "a head width that does not divide": (bert(), {"spec": {"head_dim": 4}}, "/spec/head_dim", "a divisor of 15"),
    "heads as text": (bert(), {"spec": {"num_heads": "3"}}, "/spec/num_heads", "a positive integer"),
    "heads as a truth": (bert(), {"spec": {"num_heads": True}}, "/spec/num_heads", "a positive integer"),
    "another head count than kernels": (
        keras(),
        {"spec": {"num_heads": 5}},
        "/spec/num_heads",
        "expected 3, as the tensors have it, got 5",
    ),
    "another width": (bert(), {"spec": {"num_heads": 3, "d_model": 16}}, "/spec/d_model", "expected 15"),
    "other key heads": (llama(), {"spec": ROPE | {"num_kv_heads": 4}}, "/spec/num_kv_heads", "expected 2"),
    "another bias": (bert(), {"spec": NUM_HEADS | {"bias": False}}, "/spec/bias", "expected true"),
    "another bias of one": (
        llama(q_proj__bias=draw(1, 24), k_proj__bias=draw(2, 12), v_proj__bias=draw(3, 12)),
        {"spec": ROPE | {"bias": {"query": True, "key": True, "value": True, "output": True}}},
        "/spec/bias",
        '"output": false',
    ),
    "norms that are not there": (llama(), {"spec": ROPE | {"qk_norm": {}}}, "/spec/qk_norm", "none"),
    "sinks that are not there": (llama(), {"spec": ROPE | {"sinks": True}}, "/spec/sinks", "none"),
    "sinks denied": (llama(sinks=draw(1, 4)), {"spec": ROPE | {"sinks": False}}, "/spec/sinks", "one"),
    "a table that is not there": (bert(), {"spec": NUM_HEADS | {"relative_bias": {}}}, "/spec/relative_bias", "none"),
    "norms of an unknown kind": (ours(query_norm__weight=(5,), key_norm__weight=(5,)), {"spec": NUM_HEADS}, "/spec/qk_norm", "the kind"),
    "a table of an unknown kind": (ours(relative_bias=(8, 3)), {"spec": NUM_HEADS}, "/spec/relative_bias", "the kind"),
    "projections denied": (
        bert(),
        {"layout": "bert", "spec": NUM_HEADS | {"projections": False}},
        "/spec/projections",
        "true",
    ),
    "no rope given": (llama(), {"spec": {"num_heads": 4}}, "/spec/rope", '{"theta": 10000, "interleaved": false} as Llama'),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_invalid_checkpoints_are_refused_at_their_cause(name):
    """The first problem points to the cause, and says what is expected."""
    checkpoint, how, at, words = REFUSALS[name]
    with pytest.raises(InvalidRequest) as refusal:
        read_layer(checkpoint, **how)
    assert refusal.value.problems[0].at.startswith(at)
    assert words in str(refusal.value.problems[0])


def test_every_missing_tensor_is_named():
    with pytest.raises(InvalidRequest) as refusal:
        read_layer(bert(self__key__weight=None, output__dense__bias=None), spec=NUM_HEADS)
    assert [problem.at for problem in refusal.value.problems] == [f"{A0}.self.key.weight", f"{A0}.output.dense.bias"]


def test_many_unknown_tensors_are_counted():
    """The first eight, and how many more."""
    strange = {f"strange{i}": draw(i, 2) for i in range(20)}
    with pytest.raises(InvalidRequest) as refusal:
        read_layer(bert(**strange), spec=NUM_HEADS)
    assert len(refusal.value.problems) == 9
    assert refusal.value.problems[-1].got == "12 more"


def test_every_layout_has_a_spelling_and_a_description():
    """Layouts that only a model's config selects need no description."""
    selected_by_config = {row.layout for family in FAMILIES.values() for row in family.values()}
    assert {spelling.name for spelling in LAYOUTS} == {*NAMES, *selected_by_config}


def test_random_checkpoints_are_read_or_refused():
    """Names of any layout with random shapes, dtypes and specs: they are read or refused, and raise no other exception."""
    stream = np.random.RandomState(0)
    values = [None, 0, 1, 2, 3, 4, -1, 2.5, "3", True, False, {}, [], {"dims": 2}, {"theta": 1e4}, {"buckets": 4}]
    fields = [
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "rope",
        "bias",
        "qk_norm",
        "relative_bias",
        "sinks",
        "scale",
        "projections",
        "d_model",
    ]
    outcomes, spellings = set(), [spelling for spelling in LAYOUTS if spelling.name in NAMES]
    for _ in range(4000):
        spelling = spellings[stream.randint(len(spellings))]
        side = int(stream.choice([0, 1, 6, 12]))
        checkpoint = {}
        for name in spelling.roles:
            if stream.rand() < 0.9:
                shape = stream.choice([side, 3 * side, 3, 2], size=stream.choice([0, 1, 2, 2, 2, 3, 3]))
                checkpoint[f"a.{name}"] = np.zeros(shape, stream.choice([np.float32, np.float64, np.float16, np.int8]))
        spec = {str(field): values[stream.randint(len(values))] for field in stream.choice(fields, size=3, replace=False)}
        layout = spelling.name if stream.rand() < 0.8 else None
        try:
            read_layer(checkpoint, layout=layout, prefix=str(stream.choice(["", "a", "a.", "b"])), spec=spec)
            outcomes.add("read")
        except InvalidRequest as refusal:
            outcomes.add(refusal.problems[0].at.split("/")[1])
    assert outcomes >= {"read", "weights", "spec", "layout", "prefix"}
