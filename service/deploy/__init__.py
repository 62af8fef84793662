"""FLOOR 5: the application on engines that exist. Each module is one engine; none is needed to serve from one process."""
