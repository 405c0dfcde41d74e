"""Lowering to OpenMP loops and BLAS calls."""
