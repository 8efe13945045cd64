"""Checkpoints of other programs, opened in place: each becomes a manifest and an index in memory."""
