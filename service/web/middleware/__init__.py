"""Code that runs around every request: access log, guard, telemetry."""
