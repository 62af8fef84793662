"""FLOOR 2: computes attention, its metrics and figures from arrays. Independent of requests, JSON and queues."""
