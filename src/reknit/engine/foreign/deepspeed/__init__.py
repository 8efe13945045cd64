"""Checkpoints of DeepSpeed, read in place."""
