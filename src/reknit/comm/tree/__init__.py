"""Rounds between the ranks of a tree, in one process, over sockets of one host, or over gRPC."""
