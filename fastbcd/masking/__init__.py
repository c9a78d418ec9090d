"""Masks, the activations that carry them, and `convert`, which puts both into a network."""
