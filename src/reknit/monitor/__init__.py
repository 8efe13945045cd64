"""What happened: every phase of every save and load, with rank, seconds, bytes and outcome."""
