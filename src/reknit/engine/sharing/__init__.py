"""Bytes that several ranks want, read once and passed on."""
