"""The layers of one process: their registry, files and loading, and the coordination of processes that share a folder of layers."""
