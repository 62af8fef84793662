"""FLOOR 2: computes attention, its metrics and figures from arrays. Independent of requests, JSON and queues.

In the order in which to read it:

    call.py, masks.py        the input of a layer and its result; which keys each query may attend to
    layer.py                 the computation: project, attend, project back; it chooses between the kernels
    projections.py           to heads and back, with numerics.py (datatypes, products) and positions.py (RoPE)
    eager.py                 scores, softmax, dropout and weighted values in blocks of rows, with positions.py (biases, terms)
    sdpa.py, short.py        torch's fused kernels; short calls in C (native/)
    indexer.py               selects the keys that a query attends to by index scores
    operations.py            what may replace the forward pass of a layer
    cache.py, decoding.py    cached keys and values, and attention to them
    initialization.py        draws the weights of a spec
    reference/               the same computation in NumPy float64, with which everything is compared
    metrics/, figures/       metrics and figures of heads
    compare/                 someone's attention against the reference
"""
