"""Records: every phase of every save and load, and its storage operations."""
