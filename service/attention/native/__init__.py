"""Compiled code for short calls: C sources, and the Python module that finds out whether it was built."""
