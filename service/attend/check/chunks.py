"""The reference as a candidate with a cache computes: one call for each chunk of rows, with the keys up to its last one.

For the right layer that changes nothing. A mistake such as a merge without a transpose mixes the rows of one call, and so depends on the
chunks.
"""

from typing import Any

import numpy as np

from attend.check.cases import CheckCase
from attend.check.layer import Layer
from attend.tensors import Array


def in_chunks(layer: type[Layer], case: CheckCase) -> type[Layer]:
    """The layer with every step that a mistake may change computed for each chunk of rows. ValueError: a step needs all rows at once."""
    stops = np.cumsum(case.chunks).tolist()
    more = case.key.shape[1] - case.query.shape[1]  # keys of rows that were rolled back after the first chunk
    queries = [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
    keys = [slice(0, stop + (more if i else 0)) for i, stop in enumerate(stops)]
    own = [slice(before.stop, after.stop) for before, after in zip([slice(0, 0), *keys], keys, strict=False)]

    class Chunked(layer):  # type: ignore[misc, valid-type]  # the layer is a variable
        def project_heads(self, name: str, x: Array) -> Array:
            parts = queries if name == "query" else own
            return np.concatenate([super(Chunked, self).project_heads(name, x[:, part]) for part in parts], axis=2)

        def raw_scores(self, q: Array, k: Array) -> Array:
            scores = np.zeros((*q.shape[:3], k.shape[2]))
            for i, j in zip(queries, keys, strict=True):
                scores[:, :, i, j] = super().raw_scores(q[:, :, i], k[:, :, j])
            return scores

        def weights_of(self, scores: Array, sinks: Array | None) -> Any:
            weights = np.zeros(scores.shape)
            for i, j in zip(queries, keys, strict=True):
                weights[:, :, i, j] = super().weights_of(scores[:, :, i, j], sinks)[0]
            return weights, scores[..., 0]

        def apply_weights(self, weights: Array, values: Array) -> Array:
            parts = [super(Chunked, self).apply_weights(weights[:, :, i, j], values[:, :, j]) for i, j in zip(queries, keys, strict=True)]
            return np.concatenate(parts, axis=2)

        def merge_heads(self, x: Array) -> Array:
            return np.concatenate([super(Chunked, self).merge_heads(x[:, :, part]) for part in queries], axis=1)

    return Chunked
