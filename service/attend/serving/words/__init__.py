"""Words of a text as vectors: those of a model that was trained on them, or hashes, which mean nothing. A model is a file here."""
