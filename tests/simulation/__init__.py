"""The service in a simulated process: clock, threads, sockets, files and faults are drawn from one seed (docs/reliability.md)."""
