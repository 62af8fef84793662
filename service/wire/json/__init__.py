"""JSON bodies to arrays and back."""
