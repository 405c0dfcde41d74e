"""Rewrites that use algebra: stacked projections, folded scales, dead work."""
