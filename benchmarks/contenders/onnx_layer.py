"""A layer's decoding step in ONNX Runtime: four products and GroupQueryAttention, with keys and values in preallocated buffers.

Needs the packages onnx and onnxruntime. Past and present are the same buffers, so nothing is copied.
"""

from collections.abc import Callable, Mapping

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, ValueInfoProto, helper

Floats = NDArray[np.float32]


def step(weights: Mapping[str, Floats], heads: int, row: Floats, past: tuple[Floats, Floats], threads: int) -> Callable[[], Floats]:
    """A function that computes the output [1, 1, width] of `row` [1, 1, width], which it writes into the last place of `past`.

    `weights` are those of the layer by canonical name; `past`, key and value [1, kv_heads, n, d], is copied once.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(_model(weights, heads, past[0].shape), options, providers=["CPUExecutionProvider"])
    buffers = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in past]
    places, binding = past[0].shape[2], session.io_binding()
    binding.bind_cpu_input("row", row)
    binding.bind_cpu_input("last", np.array([places - 1], np.int32))
    binding.bind_cpu_input("total", np.array(places, np.int32))
    for name, buffer in zip(("key", "value"), buffers, strict=True):
        binding.bind_ortvalue_input(f"past_{name}", buffer)
        binding.bind_ortvalue_output(f"present_{name}", buffer)
    binding.bind_output("output")

    def run() -> Floats:
        session.run_with_iobinding(binding)
        output: Floats = binding.get_outputs()[-1].numpy()  # the buffers that were bound last
        return output

    return run


def _model(weights: Mapping[str, Floats], heads: int, past: tuple[int, ...]) -> bytes:
    def tensor(name: str, shape: tuple[int, ...], kind: int = TensorProto.FLOAT) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    def projection(name: str, x: str) -> list[object]:
        product = f"{name}.product"
        return [helper.make_node("MatMul", [x, f"{name}.weight"], [product]), helper.make_node("Add", [product, f"{name}.bias"], [name])]

    width = weights["output.weight"].shape[0]
    constants = {name: array.T if name.endswith("weight") else array for name, array in weights.items()}
    inputs = ["query", "key", "value", "past_key", "past_value", "last", "total"]
    outputs = ["heads", "present_key", "present_value"]
    sizes = {"num_heads": heads, "kv_num_heads": past[1]}
    attention = helper.make_node("GroupQueryAttention", inputs, outputs, domain="com.microsoft", **sizes)
    nodes = [node for name in ("query", "key", "value") for node in projection(name, "row")] + [attention] + projection("output", "heads")
    graph = helper.make_graph(
        nodes,
        "step",
        [
            tensor("row", (1, 1, width)),
            *(tensor(f"past_{name}", past) for name in ("key", "value")),
            tensor("last", (1,), TensorProto.INT32),
            tensor("total", (), TensorProto.INT32),
        ],
        [*(tensor(f"present_{name}", past) for name in ("key", "value")), tensor("output", (1, 1, width))],
        [
            helper.make_tensor(name, TensorProto.FLOAT, x.shape, np.ascontiguousarray(x).tobytes(), raw=True)
            for name, x in constants.items()
        ],
    )
    versions = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model: bytes = helper.make_model(graph, opset_imports=versions, ir_version=10).SerializeToString()
    return model
