"""From operators to maps and library calls, one sub-package for each target."""
