"""Rewrites that choose the strides of containers."""
