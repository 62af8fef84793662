"""GluonNLP's BERT and Transformer cells in MXNet. Needs mxnet==1.9.1, gluonnlp==0.10.0 and "numpy<1.24", so an old Python (3.8 or 3.9).

The checkpoint is the whole cell under the names that `save_parameters` writes: its attention's output projection is the cell's `proj`.
BERT's cell is time-major and takes a length for each query; the others take masks of what may be attended, and give empty rows no weight.
"""

import gluonnlp
import mxnet
import numpy as np
from casefile import case, draw, draw_all, save
from gluonnlp.model.bert import BERTEncoderCell
from gluonnlp.model.transformer import TransformerDecoderCell, TransformerEncoderCell

VERSIONS = {"gluonnlp": gluonnlp.__version__, "mxnet": mxnet.__version__}
SIZES = {"units": 15, "hidden_size": 13, "num_heads": 3}
CAUSAL = np.tril(np.ones((4, 4)))
MASK = np.stack([CAUSAL, [[1, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]]])
TO_MEMORY = np.stack([[[1, 1, 1, 0, 0]] * 4, [[1, 1, 1, 1, 1]] * 4])
LENGTHS = np.array([[3, 3, 3, 3], [1, 2, 4, 3]])


def watch(cell, inputs, *places):
    """The cell's weights, all drawn anew, and what went by at each (attention, projection): query, key, weights, output."""
    cell.initialize()
    cell(*inputs)  # shapes are inferred
    parameters = cell._collect_params_with_prefix()
    drawn = draw_all(17, {name: x.shape for name, x in parameters.items()})
    for name, parameter in parameters.items():
        parameter.set_data(mxnet.nd.array(drawn[name]))
    seen = [{} for _ in places]
    for (attention, proj), one in zip(places, seen):  # noqa: B905 (Python 3.9 has no strict)
        attention.register_forward_hook(
            lambda _, args, result, one=one: one.update(query=args[0].asnumpy(), key=args[1].asnumpy(), weights=result[1].asnumpy())
        )
        proj.register_forward_hook(lambda _, args, result, one=one: one.update(output=result.asnumpy()))
    cell(*inputs)
    return drawn, seen


def bert():
    cell = BERTEncoderCell(**SIZES)
    inputs = mxnet.nd.array(draw(1, 4, 2, 15)), mxnet.nd.array(LENGTHS, dtype="int32")  # [length, batch, units]
    drawn, (seen,) = watch(cell, inputs, (cell.attention_cell, cell.proj))
    request = {"query": seen["query"].swapaxes(0, 1), "valid_lens": LENGTHS.tolist()}
    cases = [case("a length per query", {"spec": {"num_heads": 3}}, request, seen["output"].swapaxes(0, 1), seen["weights"])]
    save("gluonnlp_bert", "BERTEncoderCell", VERSIONS, drawn, cases)


def transformer():
    x, memory, mask, to_memory = map(mxnet.nd.array, (draw(1, 2, 4, 15), draw(2, 2, 5, 15), MASK, TO_MEMORY))
    cell = TransformerEncoderCell(**SIZES)
    drawn, (seen,) = watch(cell, (x, mask), (cell.attention_cell, cell.proj))
    request = {"query": seen["query"], "attend_mask": MASK.astype(int).tolist()}
    cases = [case("a mask per item, one row of it empty", {"spec": {"num_heads": 3}}, request, seen["output"], seen["weights"])]
    save("gluonnlp_encoder", "TransformerEncoderCell", VERSIONS, drawn, cases)

    cell = TransformerDecoderCell(**SIZES)
    places = (cell.attention_cell_in, cell.proj_in), (cell.attention_cell_inter, cell.proj_inter)
    drawn, (own, other) = watch(cell, (x, memory, mask, to_memory), *places)
    cases = []
    for about, cell_name, one, allowed in (("its own", "in", own, MASK), ("to the encoder", "inter", other, TO_MEMORY)):
        request = {"query": one["query"], "attend_mask": allowed.astype(int).tolist()}
        if cell_name == "inter":
            request["key"] = one["key"]
        load = {"spec": {"num_heads": 3}, "prefix": f"attention_cell_{cell_name}"}
        cases.append(case(about, load, request, one["output"], one["weights"]))
    save("gluonnlp_decoder", "TransformerDecoderCell: two attentions side by side", VERSIONS, drawn, cases)


if __name__ == "__main__":
    bert()
    transformer()
