"""The kernels: implementations of several steps of a program at once, each of which declares which ones.

fusion.py   puts a kernel in the place of the steps that it fuses
sdpa.py     torch's fused kernels: head outputs without [queries, keys]
short.py    whole small calls in C (`attention/native/`)
pages.py    one query that attends to the pages of a cache, in C
choice.py   which kernel computes the calls of a layer, told from its spec
"""
