"""The index: where every box of every tensor lies."""
