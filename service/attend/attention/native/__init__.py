"""Compiled code for short calls and decoding steps: C sources, and the Python module that finds out whether it was built."""
