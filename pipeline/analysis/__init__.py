"""Operator classes, flop, words moved and what follows from them."""
