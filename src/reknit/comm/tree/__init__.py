"""Rounds between the ranks of a tree, in one process or over gRPC."""
