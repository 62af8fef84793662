"""TIER 5: runs the application on existing serving platforms, one module for each. A single process needs none of them."""
