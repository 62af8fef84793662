"""What each head does, in numbers: weights, values and head outputs -> metrics. Pure functions of arrays; knows no request.

`measure` is the straight line; the formulas stand in `rows`, `links`, `between`, `values`, `importance` and `single`. Weights are read a
block of query rows at a time, so that [q, k] is held only for the one metric that is of that shape. What is not defined is NaN.
"""
