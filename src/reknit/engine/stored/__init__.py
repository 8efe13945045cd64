"""Checkpoints that are committed: open, verify, copy, list and clear up."""
