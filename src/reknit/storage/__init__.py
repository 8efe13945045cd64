"""Stores: read and write bytes; no other code depends on the kind of a store."""
