"""Optimizers of torch, by the names of their parameters."""
