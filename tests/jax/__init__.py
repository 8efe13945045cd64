"""Saving and loading with JAX, always in processes of its own."""
