"""Meetings of ranks without a connection."""
