"""Operator benchmarks, their database, and the choice of a configuration."""
