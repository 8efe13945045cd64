"""What happened: every phase of every save and load, and what it asked of its store."""
