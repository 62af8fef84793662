"""The Open Inference Protocol over HTTP, under /v2. The engine answers its calls like those of /attend."""
