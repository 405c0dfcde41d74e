"""The commands of the command line, one module each. Imported only when they run."""
