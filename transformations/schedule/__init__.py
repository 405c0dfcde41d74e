"""Rewrites that map lowered loops to threads, vectors and buffers."""
