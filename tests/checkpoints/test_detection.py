"""Finding the layers of a checkpoint, and selecting one without reading the others."""

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import pytest

from attend.checkpoints import detect, layers_in, read_layer
from attend.checkpoints.layouts import LAYOUTS, NAMES
from attend.errors import InvalidRequest
from support.checkpoints import draw

FOUR = {"bert": ("self.query", "self.key", "self.value", "output.dense"), "distilbert": ("q_lin", "k_lin", "v_lin", "out_lin")}


def bert(layers, prefix="bert.encoder.layer", joint=".", width=15):
    """Every layer's tensors differ, and there are other tensors between them."""
    w = {"bert.embeddings.word_embeddings.weight": draw(0, 9, width)}
    for i in range(layers):
        for j, name in enumerate(FOUR["bert"]):
            w[f"{prefix}.{i}.attention.{name}.weight"] = draw(9 * i + j, width, width)
            w[f"{prefix}.{i}.attention.{name}.bias"] = draw(9 * i + j, width)
        w[f"{prefix}.{i}.output.dense.weight"] = draw(i, width, 4)
        w[f"{prefix}.{i}.output.dense.bias"] = draw(i, width)
    return {name.replace(".", joint): x for name, x in w.items()}


class RecordingCheckpoint(Mapping):
    """A checkpoint that records which tensors are read."""

    def __init__(self, tensors):
        self.tensors, self.read = tensors, set()

    def __getitem__(self, name):
        self.read.add(name)
        return self.tensors[name]

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self):
        return len(self.tensors)


@pytest.mark.parametrize("joint", [".", "/"])
@pytest.mark.parametrize("end", ["", ".", "/", ".attention", "/attention/", ".attention."])
def test_a_prefix_selects_whole_segments(joint, end):
    """layer.1 is not layer.10 and following; dots and slashes are the same, at the end too."""
    checkpoint = bert(12, joint=joint)
    _, weights = read_layer(checkpoint, prefix=f"bert.encoder.layer.1{end}", spec={"num_heads": 3})
    assert weights["query.weight"] is checkpoint[f"bert.encoder.layer.1.attention.{FOUR['bert'][0]}.weight".replace(".", joint)]


def test_without_a_prefix_the_only_layer_is_read():
    assert read_layer(bert(1), spec={"num_heads": 3})[0]["d_model"] == 15


def test_a_layer_inside_another_can_be_selected():
    """A file may nest attention in attention; the outer one then has tensors below it that are not its own, and is refused."""
    outer = {f"block.attn.W_{x}.weight": draw(i, 6, 6) for i, x in enumerate("qkvo")}
    inner = {f"block.attn.deep.W_{x}.weight": draw(9 + i, 6, 6) for i, x in enumerate("qkvo")}
    _, weights = read_layer(outer | inner, prefix="block.attn.deep", spec={"num_heads": 2})
    assert weights["query.weight"] is inner["block.attn.deep.W_q.weight"]
    with pytest.raises(InvalidRequest, match="a prefix that selects one layer"):
        read_layer(outer | inner, prefix="block.attn", spec={"num_heads": 2})


def test_only_tensors_of_the_selected_layer_are_read_and_none_is_copied():
    checkpoint = RecordingCheckpoint(bert(12))
    _, weights = read_layer(checkpoint, prefix="bert.encoder.layer.11", spec={"num_heads": 3})
    assert {name.rpartition(".attention.")[0] for name in checkpoint.read} == {"bert.encoder.layer.11"}
    originals = [checkpoint.tensors[name] for name in checkpoint.read]
    assert all(any(x is original for original in originals) for x in weights.values())


def test_transposed_and_split_tensors_are_views():
    """GPT-2's packed matrix is not copied either."""
    w = {"c_attn.weight": draw(1, 6, 18), "c_attn.bias": draw(2, 18), "c_proj.weight": draw(3, 6, 6), "c_proj.bias": draw(4, 6)}
    _, weights = read_layer(w, spec={"num_heads": 2})
    assert all(any(np.shares_memory(x, original) for original in w.values()) for x in weights.values())


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([np.float32], "float32"),
        ([ml_dtypes.bfloat16], "bfloat16"),
        ([np.float16, np.float32], "float32"),
        ([np.float16, ml_dtypes.bfloat16], "float32"),
        ([np.float32, np.float64], "float64"),
        ([">f4"], "float32"),
    ],
)
def test_the_default_dtype_is_that_of_the_tensors(dtypes, expected):
    checkpoint = {f"W_{x}.weight": draw(1, 6, 6).astype(dtypes[i % len(dtypes)]) for i, x in enumerate("qkvo")}
    assert read_layer(checkpoint, spec={"num_heads": 2})[0]["dtype"] == expected
    assert read_layer(checkpoint, spec={"num_heads": 2, "dtype": "float16"})[0]["dtype"] == "float16"


def test_layers_are_listed_in_natural_order():
    """Layer 10 after layer 9; feed-forward layers and embeddings are none."""
    assert layers_in(bert(12)) == [("bert", f"bert.encoder.layer.{i}.attention") for i in range(12)]
    assert layers_in(bert(1, joint="/")) == [("bert", "bert/encoder/layer/0/attention")]
    assert layers_in({"fc.weight": draw(1, 2, 2)}) == []


def test_one_checkpoint_may_have_layers_of_several_layouts():
    """A model of two towers: each layer with its own layout, and no one layout for the whole."""
    text = {f"text.layer.0.attention.{name}.{kind}": 0 for name in FOUR["distilbert"] for kind in ("weight", "bias")}
    image = {f"image.blocks.0.attn.{name}.{kind}": 0 for name in ("qkv", "proj") for kind in ("weight", "bias")}
    assert layers_in(text | image) == [("vit", "image.blocks.0.attn"), ("distilbert", "text.layer.0.attention")]
    assert (detect(text), detect(image), detect(text | image)) == ("distilbert", "vit", None)


def test_ambiguous_names_are_listed_with_every_layout_that_they_fit():
    names = ["h.0.self_attention.query_key_value.weight", "h.0.self_attention.dense.weight"]
    assert sorted(layers_in(names)) == [("fused", "h.0.self_attention"), ("neox", "h.0.self_attention")]
    biased = [*names, "h.0.self_attention.query_key_value.bias", "h.0.self_attention.dense.bias"]
    assert {layout for layout, _ in layers_in(biased)} == {"bloom", "fused", "neox"}
    assert detect(biased) is None


def test_cross_attention_is_listed_as_a_separate_layer():
    """Decoder layers hold two; so do GluonNLP's, side by side."""
    torch = [f"decoder.layers.0.{x}.{name}" for x in ("self_attn", "multihead_attn") for name in ("in_proj_weight", "out_proj.weight")]
    assert layers_in(torch) == [("torch_mha", "decoder.layers.0.multihead_attn"), ("torch_mha", "decoder.layers.0.self_attn")]
    gluon = [f"cell.attention_cell_{x}.proj_{name}.weight" for x in ("in", "inter") for name in ("query", "key", "value")]
    gluon += [f"cell.proj_{x}.weight" for x in ("in", "inter")]
    assert layers_in(gluon) == [("mxnet", "cell.attention_cell_in"), ("mxnet", "cell.attention_cell_inter")]


WITHOUT_CONFIG = [layout for layout in LAYOUTS if layout.name in NAMES]


@pytest.mark.parametrize("spelling", WITHOUT_CONFIG, ids=lambda spelling: f"{spelling.name} {next(iter(spelling.roles))}")
def test_every_spelling_of_a_layout_is_detected(spelling):
    """Under a stem that identifies it, its layout is the only one; otherwise it is among those to choose from."""
    stem = spelling.identified_under[0] if spelling.identified_under else "layer"
    names = [f"model/0/{stem}/{name}" for name in spelling.roles]
    prefix = f"model/0/{stem}" + (f"/{spelling.parent}" if spelling.parent else "")
    layout = {"qkv.weight": "vit", "c_attn.weight": "gpt2"}.get(next(iter(spelling.roles)), spelling.name)
    assert (layout, prefix) in layers_in(names)
    if spelling.identified_under != ():
        assert detect(names) == spelling.name
