"""Encode values that are not tensors."""
