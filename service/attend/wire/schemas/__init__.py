"""The contract as pydantic models: bodies of requests and replies."""
