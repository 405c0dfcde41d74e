"""Rewrites that join operators so that intermediate results are not written to memory."""
