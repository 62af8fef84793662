"""The cases of ONNX's operator Attention that have a past, all of them, as its own tests compute them. Needs onnx==1.23.0.

Each case is a batch of past keys and values, the new ones, and what follows, [b, heads, n, d]. What ONNX calls present is left out: past
rows, and then new ones.
"""

import json
from pathlib import Path

import numpy as np
from onnx import helper
from onnx.backend.test.case.node import collect_testcases
from safetensors.numpy import save_file


def main():
    tensors, attributes = {}, {}
    for test in collect_testcases("Attention"):
        name, (node, *others) = test.name.removeprefix("test_attention_"), test.model.graph.node
        if "past_key" not in node.input or others:  # others: the same case as a graph of smaller operators
            continue
        options = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        (inputs, outputs), *_ = test.data_sets
        given = dict(zip([x for x in node.input if x], inputs, strict=True)) | dict(zip(node.output, outputs, strict=True))
        heads = options.pop("q_num_heads", None) or given["Q"].shape[1]
        kv_heads = options.pop("kv_num_heads", None) or given["K"].shape[1]
        for key in ("Q", "K", "V", "Y"):
            if (x := given[key]).ndim == 3:
                given[key] = x.reshape(*x.shape[:2], kv_heads if key in "KV" else heads, -1).swapaxes(1, 2)
        for new, part in (("K", "key"), ("V", "value")):
            np.testing.assert_array_equal(given.pop(f"present_{part}"), np.concatenate((given[f"past_{part}"], given[new]), axis=2))
        tensors |= {f"{name}.{key}": np.ascontiguousarray(x) for key, x in given.items()}
        attributes[name] = options
    save_file(tensors, Path(__file__).parent / "caches" / "onnx_past.safetensors", {"attributes": json.dumps(attributes)})


if __name__ == "__main__":
    main()
