"""Lowering to CUDA kernels and NVIDIA's libraries."""
