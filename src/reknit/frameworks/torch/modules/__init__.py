"""Modules of torch, under any wrapper and sharding."""
