"""FLOOR 3: layers that are held, calls that are bound, scheduled and computed. Knows no HTTP."""
