"""Sessions: sequences whose projected keys and values the server keeps, for decoding with a KV cache."""
