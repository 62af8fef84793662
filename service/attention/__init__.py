"""FLOOR 2: arrays -> arrays. Knows queries, keys, masks and weights; knows no request, no JSON, no queue."""
