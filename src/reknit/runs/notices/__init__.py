"""Notices that a process will end soon: from signals, files and cloud providers."""
