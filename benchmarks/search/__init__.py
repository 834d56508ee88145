"""Search for a gradient that breaks a promise: ``python -m benchmarks.search``."""
