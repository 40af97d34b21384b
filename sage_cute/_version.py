"""The version, stated once: read by the build and by the Inductor cache key."""

__version__ = "0.1.0"
