"""One load: from a committed checkpoint to live objects."""
