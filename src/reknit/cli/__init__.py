"""The command `reknit`: work with checkpoints at a terminal."""
