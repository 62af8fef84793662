"""The float64 NumPy implementation that all others are compared with. Shares no arithmetic with the rest of `attention`.

forward.py      the layer, step by step
request.py      its arguments, and which keys they block
operators/      the arithmetic of each operator
"""
