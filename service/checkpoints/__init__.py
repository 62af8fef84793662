"""Checkpoints of every framework that attention is written in, read one layer at a time: names and shapes in, canonical weights out.

    read_layer(tensors, layout="bert", prefix="encoder.layer.3", spec={"num_heads": 12})  ->  fields for LayerSpec, weights
    layers_in(tensors)  ->  [("bert", "encoder.layer.0.attention"), …]
    detect(names)  ->  "bert", or None where names do not tell

Pure functions over arrays: they know neither files nor requests nor torch. A layout is a row or two of a table (`table.py`; a module for
each family, with what it assumes at its head), so a new one is data and at most one function. Nothing is guessed: where names or shapes
leave two readings, both are named and the caller chooses.
"""

from service.checkpoints.detection import detect, layers_in
from service.checkpoints.reader import read_layer
from service.checkpoints.table import LAYOUTS

__all__ = ["LAYOUTS", "detect", "layers_in", "read_layer"]
