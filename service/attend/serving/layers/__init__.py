"""The layers of one process: their registry, files and loading, and the folder of layers, which several processes may share."""
