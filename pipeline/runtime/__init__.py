"""The compiled layer as a PyTorch module."""
