"""The kernels: implementations of attention, each of which declares what it computes.

declaration.py   what a kernel declares: fields of a layer's spec, options of a call, outputs, datatypes, devices
choose.py        computes a call with the first kernel that declares and can compute it, for layer calls and decoding steps alike
eager.py         torch's operations; declares everything, and is the last kernel of every layer
sdpa.py          torch's fused kernels: head outputs without [queries, keys]
short.py         whole small calls in C (`attention/native/`)
pages.py         one query that attends to the pages of a cache, in C
"""
