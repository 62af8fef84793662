"""Metrics of attention heads: weights, values and head outputs -> numbers. What is not defined is NaN.

`compute` is the operation; the formulas are in `rows` (weights, row by row), `heads` (heads compared) and `importance` (contributions to
the output). Weights are read in blocks of query rows, so [q, k] is held only for the one metric of that shape.
"""
