"""Metrics of attention heads, computed from weights, values and head outputs. Undefined metrics are NaN.

`compute` is the operation. The formulas are in `rows` (rows of weights) and `heads` (comparison of heads, and contributions to the output).
Weights are read in blocks of query rows, so only the one metric of shape [q, k] stores such a tensor.
"""
