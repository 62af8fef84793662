"""Reads attention layers from checkpoints of other frameworks: names and arrays in, `LayerSpec` fields and canonical weights out.

    read_layer(tensors, layout="bert", prefix="encoder.layer.3", spec={"num_heads": 12})  ->  fields for LayerSpec, weights
    layers_in(tensors)  ->  [("bert", "encoder.layer.0.attention"), …]
    detect(names)  ->  "bert", or None if the names fit several layouts or none
    read_model_layer(tensors, config, layer=3)  ->  fields and weights of a model's layer 3, by the model's config.json
    ModelFolder(path).layer(3)  ->  the description and the tensors of a layer in a folder that save_pretrained wrote

These functions take names and arrays, and do not import torch; only `folder.py` reads files. For ambiguous names or shapes, `read_layer`
raises InvalidRequest, which names the choices. A new layout is a row in `layouts.py`, or in `configured_layouts.py`
if only a config selects it, and at most one function in the file of conversions beside it.

In the order in which to read it:

    layout.py                    what a layout is: names of tensors, and their conversion to canonical weights
    matrix_names.py              how models name the matrices
    layouts.py, conversions.py   the table of layouts, and their conversions
    configured_layouts.py, configured_conversions.py   those that only a model's config selects
    detection.py, reader.py      finds layers by their names and selects one; reads it, and infers its spec from the shapes of the weights
    config.py, model.py          a model's config.json, and the layers that it describes
    unrelated_fields.py          fields of a config that no attention depends on
    families/, rope.py           how the config of each family becomes a spec
    powers.py                    powers that are the same on every processor
    folder.py                    files that save_pretrained writes
"""

from attend.checkpoints.detection import detect, layers_in
from attend.checkpoints.folder import ModelFolder, described_layers, layers_of_file
from attend.checkpoints.model import parse_config, read_model_layer
from attend.checkpoints.reader import read_layer

__all__ = [
    "ModelFolder",
    "described_layers",
    "detect",
    "layers_in",
    "layers_of_file",
    "parse_config",
    "read_layer",
    "read_model_layer",
]
