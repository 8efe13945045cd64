"""Modules and tensors of torch, with any sharding."""
