"""The nouns of reknit: pure data and geometry, known to everyone and knowing no one."""
