"""TIER 2: computes attention from arrays. Independent of requests, JSON and queues.

In the order in which to read it:

    call.py, masks.py        the input of a layer and its result; which keys each query may attend to
    program.py               a layer as an ordered tuple of steps
    dataflow.py              what follows from the values that steps read and write: which steps compute a value, what a cache keeps
    operators/               a file for each operator (RoPE, ALiBi, sinks, …): spec, weights, steps, random cases; step.py says what a
                             step is and what it is written in, projection.py projects into heads
    layer.py                 plans which steps a call needs, with or without a kernel, and runs them
    executor.py              runs steps by blocks of query rows, which rows.py bounds and cuts
    torch_arithmetic.py      what steps are written in, for torch, with linear.py (products), index_scores.py (the indexer's selection) and
                             numerics.py (datatypes); dropout.py
    kernels/                 fuse several steps; each kernel declares which, choice.py tells which one a layer gets
    native/                  the C of two kernels: short calls, and the pages of a cache
    cost.py                  the operations and the memory of a call, summed over its steps
    operations.py            what is computed for a call: the forward pass, or another; which calls may be computed together
    stacking.py              several calls as one
    cache.py, decoding.py    cached values of keys, and attention to them
    initialization.py        draws the weights of a spec
    reference/               the same program in NumPy float64, with which everything is compared
"""
