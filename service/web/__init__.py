"""FLOOR 4: the HTTP edge, the only place that knows statuses and headers. What a call means is the engine's business."""
