"""What is computed: operators, layers written in them, presets, and the same layers in plain PyTorch."""
