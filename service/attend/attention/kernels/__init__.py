"""The kernels: implementations of attention, each of which declares what it computes.

declaration.py   what a kernel declares: fields of a layer's spec, options of a call, outputs, datatypes, devices
choose.py        chooses among kernels by their declarations, for layer calls and decoding steps alike
eager.py         torch's operations; computes everything that any other kernel leaves
sdpa.py          torch's fused kernels: head outputs without [queries, keys]
short.py         whole small calls in C (`attention/native/`)
pages.py         one query that attends to the pages of a cache, in C
"""
