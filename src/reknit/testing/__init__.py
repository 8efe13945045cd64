"""Shipped test pieces: the suite that every store must pass, and stores and ranks that fail on purpose."""
