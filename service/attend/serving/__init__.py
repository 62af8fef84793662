"""TIER 3: loads layers; prepares, schedules and computes calls. Independent of HTTP."""
