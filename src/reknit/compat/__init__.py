"""Interfaces of other checkpoint libraries, for scripts that change one import."""
