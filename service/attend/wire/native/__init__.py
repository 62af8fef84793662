"""Compiled code: C sources, and the Python modules that use them or do without."""
