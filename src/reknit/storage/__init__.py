"""Stores: read and write bytes; no other code knows what a store is."""
