"""Compiled layers against float64, and the long seeded runs of it."""
