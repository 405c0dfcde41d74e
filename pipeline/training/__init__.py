"""Data, training loop and checkpoints."""
