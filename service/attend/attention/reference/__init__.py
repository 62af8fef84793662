"""The reference: the program of a layer, run whole in NumPy float64, with masks and positions that it computes for itself.

forward.py      runs it; every output
call.py         its arguments, and which keys they block
arithmetic.py   what steps are written in
"""
