"""Measurements of the promises we make: `python -m benchmarks` runs them, writes results and docs/benchmarks.md."""
