"""A run's steps kept safe: when to save, where to go on, what to keep, and what to do before the end."""
