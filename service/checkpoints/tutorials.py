"""Our own layout, and those of textbooks: Dive into Deep Learning in its four frameworks, MXNet's GluonNLP, and bare NumPy.

* `attend`: canonical names and shapes; every part of a spec may be there.
* `d2l`: W_q, W_k, W_v, W_o. As `.weight` (torch, MXNet) they are [out, in]; as `/kernel` (Flax) or `/vars/0` (Keras' files) [in, out].
  Keras' variable paths for that layer (`dense/kernel`, `dense_1/kernel`) do not say which is which: no layout reads them.
* `mxnet`: GluonNLP's cells under the names that `save_parameters` writes, [out, in]; the output projection is the cell's `proj`,
  beside the attention. Of a decoder's two attentions `attention_cell_in` is its own, `attention_cell_inter` that to the encoder.
* `numpy`: bare matrices applied as x @ W, so [in, out], with or without biases b_q, b_k, b_v, b_o.
"""

from service.checkpoints.layout import ALL_BIASES, QKV_BIASES, Found, Layout, Read, as_linear, kernels, linear, linear_names
from service.spec import PROJECTIONS

EXTRAS = {name: name for name in ("query_norm.weight", "key_norm.weight", "sinks", "relative_bias")}
EITHER = (QKV_BIASES, ("output.bias",))
EXTRA_OPTIONS = (("query_norm.weight", "key_norm.weight"), ("sinks",), ("relative_bias",))


def canonical(found: Found) -> Read:
    table = {"relative_bias": found.get("relative_bias", "buckets", "heads")} if found.has("relative_bias") else {}
    told = {"relative_bias": {"buckets": len(table["relative_bias"])}} if table else {}
    return Read(as_linear(found) | table, told)


def _d2l(weight: str, bias: str) -> dict[str, str]:
    return linear_names("W_q", "W_k", "W_v", "W_o", weight=weight, bias=bias)


def _gluon(cell: str, proj: str) -> Layout:
    """A cell keeps its attention in one child, and the output projection in another."""
    names = linear_names(f"{cell}.proj_query", f"{cell}.proj_key", f"{cell}.proj_value", proj)
    return Layout("mxnet", names, linear, optional=EITHER, inside=cell)


def _bare(matrix: str, vector: str) -> dict[str, str]:
    letters = dict(zip(PROJECTIONS, "qkvo", strict=True))
    weights = {f"{matrix}{letter}": f"{name}.weight" for name, letter in letters.items()}
    return weights | {f"{vector}{letter}": f"{name}.bias" for name, letter in letters.items()}


FORMS = (
    Layout("attend", linear_names(*PROJECTIONS) | EXTRAS, canonical, optional=(*((bias,) for bias in ALL_BIASES), *EXTRA_OPTIONS)),
    Layout("d2l", _d2l("weight", "bias"), linear, optional=(ALL_BIASES,)),
    Layout("d2l", _d2l("kernel", "bias"), kernels, optional=(ALL_BIASES,)),
    Layout("d2l", _d2l("vars.0", "vars.1"), kernels, optional=(ALL_BIASES,), aside={"*seed_generator*": None}),
    _gluon("attention_cell", "proj"),
    _gluon("attention_cell_in", "proj_in"),
    _gluon("attention_cell_inter", "proj_inter"),
    *(Layout("numpy", _bare(*spelled), kernels, optional=EITHER) for spelled in (("W_", "b_"), ("W", "b"), ("w_", "b_"))),
)
