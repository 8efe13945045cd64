"""Names of other programs."""
