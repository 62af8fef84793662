"""Short calls in C. The extension is optional: without it they are computed by torch, like all others."""
