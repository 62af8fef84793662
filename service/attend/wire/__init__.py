"""TIER 2: decodes requests and encodes replies. Independent of torch, layers, HTTP statuses and the event loop."""
