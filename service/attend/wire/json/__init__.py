"""JSON bodies -> arrays, and arrays -> JSON."""
