"""The cases of ONNX's operator Attention that have a past, as its own test suite computes them. Needs the package `onnx` (1.23).

Each case is an item of a batch: its past keys and values, the new ones, and what follows. Masks of numbers are added to the scores.
"""

import json
from pathlib import Path

import numpy as np
from onnx import helper
from onnx.backend.test.case.node import collect_testcases
from safetensors.numpy import save_file

NAMES = (
    "4d_gqa_with_past_and_present",
    "4d_diff_heads_with_past_and_present_mask4d",
    "4d_causal_with_past_and_present",
    "3d_gqa_with_past_and_present",
    "3d_with_past_and_present_qk_matmul_softcap",
    "3d_with_past_and_present_qk_matmul_softmax",
    "local_window_with_past",
)
ITEM = 1  # of each batch of two


def of_item(x, heads):
    """[heads, n, d] of one item, of [b, heads, n, d] or [b, n, heads * d]."""
    return x[ITEM] if x.ndim == 4 else x[ITEM].reshape(x.shape[1], heads, -1).swapaxes(0, 1)


def main():
    tensors, attributes = {}, {}
    for test in collect_testcases("Attention"):
        name, (node, *others) = test.name.removeprefix("test_attention_"), test.model.graph.node
        if name not in NAMES or others:
            continue
        options = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        (inputs, outputs), *_ = test.data_sets
        given = dict(zip([x for x in node.input if x], inputs, strict=True)) | dict(zip(node.output, outputs, strict=True))
        kv_heads = given["past_key"].shape[1]
        heads = options.pop("q_num_heads", None) or given["Q"].shape[1]
        options.pop("kv_num_heads", None)
        for key, x in given.items():
            if key == "attn_mask":
                x = np.broadcast_to(x, (2, 1, *x.shape) if x.ndim == 2 else x.shape)[ITEM]
            else:
                x = of_item(x, heads if key in ("Q", "Y", "qk_matmul_output") else kv_heads)
            tensors[f"{name}.{key}"] = np.ascontiguousarray(x)
        attributes[name] = options
    assert set(attributes) == set(NAMES)
    save_file(tensors, Path(__file__).parent / "caches" / "onnx_past.safetensors", {"attributes": json.dumps(attributes)})


if __name__ == "__main__":
    main()
