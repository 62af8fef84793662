"""Floor 2: decodes requests and encodes replies. It depends on no torch, layers, HTTP statuses or event loop."""
