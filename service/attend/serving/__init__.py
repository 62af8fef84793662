"""TIER 3: loads layers; binds, schedules and computes calls. Independent of HTTP."""
