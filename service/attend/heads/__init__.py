"""TIER 3: metrics and figures of attention heads, from arrays. Needs no server.

metrics/    numbers per head, query, key or pair of heads
circuits.py  QK and OV circuits of a layer, from its weights alone
figures/    pictures: PNG, SVG or a standalone HTML page
"""
