"""TIER 2: computes attention from arrays. Independent of requests, JSON and queues.

In the order in which to read it:

    call.py, masks.py        the input of a layer and its result; which keys each query may attend to
    layer.py                 the computation: project, attend, project back; a layer has tuples of kernels
    operators/               a file for each operator (RoPE, ALiBi, sinks, …): spec, weights, arithmetic, cost, random cases; stages.py has
                             the stages that it may compute
    projections.py           to heads and back, with linear.py (products) and numerics.py (datatypes)
    kernels/                 scores, softmax and weighted values; each kernel declares what it computes, choose.py takes the first that can
    rows.py                  blocks of query rows, which bound memory
    native/                  the C of two kernels: short calls, and the pages of a cache
    operations.py            what is computed for a call: the forward pass, or another; which calls may be computed together
    stacking.py              several calls as one
    cache.py, decoding.py    cached keys and values, and attention to them
    initialization.py        draws the weights of a spec
    reference/               the same computation in NumPy float64, with which everything is compared
"""
