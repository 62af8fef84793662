"""What surrounds every request: access log, guard, telemetry."""
