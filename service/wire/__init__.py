"""FLOOR 2: bytes <-> requests and replies. Knows shapes and fields; knows no torch, no layer, no HTTP status, no event loop."""
