"""Commands that show events."""
