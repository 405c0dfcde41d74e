"""What runs when: compiler, build cache, PyTorch runtime, training and the command line."""
