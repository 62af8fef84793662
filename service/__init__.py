"""Multi-head attention as a service. Import from the rooms; this file holds the version alone, so that a client stays light."""

__version__ = "0.1.0"
