"""The vocabulary: one file per operator, with its shape rule, counts, reference semantics and gradient rule."""
