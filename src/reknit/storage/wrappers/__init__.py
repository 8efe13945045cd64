"""Stores that wrap other stores."""
