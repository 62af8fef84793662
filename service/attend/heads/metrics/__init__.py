"""Metrics of attention heads, computed from weights, values and head outputs. Undefined metrics are NaN.

compute.py has the operation. The formulas are in rows.py (rows of weights), heads.py (comparison of heads) and contributions.py (of heads
to the output). Weights are read in blocks of query rows, so only the one metric of shape [q, k] stores such a tensor.
"""
