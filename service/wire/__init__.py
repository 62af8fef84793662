"""Floor 2: bytes <-> requests and replies. It depends on neither torch nor layers, HTTP statuses or the event loop."""
