"""The layers of one process: registry, loading and replacing, files, coordination between processes."""
