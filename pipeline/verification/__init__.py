"""Compiled layers against float64, and the long seeded runs of it."""

from stepdown.pipeline.verification.report import Report, Row
from stepdown.pipeline.verification.rule import verify_layer

__all__ = ["Report", "Row", "verify_layer"]
