"""The calls on the layer of Dive into Deep Learning, which are the same in each of its four frameworks, as are the weights. NumPy alone.

The layer, after section 11.5 of the book: queries, keys and values are projected to `num_hiddens`, split into heads, scored by
q·k/sqrt(d); positions beyond a query's valid length get the score -1e6 before the softmax; the heads' averages are concatenated and
projected by W_o. Projections have biases only if `bias` is true. So a valid length of 0 gives every key the same weight.
"""

import numpy as np
from casefile import case, draw, draw_all, save

NUM_HIDDENS, NUM_HEADS = 15, 3
WIDTHS = {"W_q": 7, "W_k": 11, "W_v": 13, "W_o": NUM_HIDDENS}
CALLS = {
    "no lengths": None,
    "a length per item": np.array([3, 2]),
    "a length per query, one of them 0": np.array([[1, 2, 3, 5], [4, 0, 5, 1]]),
}


def weights(bias):
    """Name -> array: matrices [out, in] under `W_q`, …, and vectors under `W_q.bias`, … if `bias` is true."""
    shapes = {name: (NUM_HIDDENS, width) for name, width in WIDTHS.items()}
    shapes.update({f"{name}.bias": (NUM_HIDDENS,) for name in WIDTHS} if bias else {})
    return draw_all(3, shapes)


def inputs():
    """Queries [2, 4, 7], keys [2, 5, 11], values [2, 5, 13]."""
    return draw(4, 2, 4, 7), draw(5, 2, 5, 11), draw(6, 2, 5, 13)


def write_cases(framework, versions, checkpoint, bias, compute):
    """Writes `frameworks/d2l_FRAMEWORK[_bias].json`; `compute(queries, keys, values, valid_lens)` gives the layer's output and its
    attention weights [b * heads, q, k], `checkpoint` is what the framework would save."""
    cases = []
    for about, lens in CALLS.items():
        query, key, value = inputs()
        output, attention_weights = compute(query, key, value, lens)
        attention_weights = np.asarray(attention_weights).reshape(2, NUM_HEADS, 4, 5)
        request = {"query": query, "key": key, "value": value, "fully_masked": "uniform"}
        request["valid_lens"] = None if lens is None else lens.tolist()
        cases.append(case(about, {"spec": {"num_heads": NUM_HEADS}}, request, np.asarray(output), attention_weights))
    name = f"d2l_{framework}{'_bias' if bias else ''}"
    save(name, f"Dive into Deep Learning's layer in {framework}{', with biases' if bias else ''}", versions, checkpoint, cases)
