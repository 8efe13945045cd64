"""One save: what a rank holds becomes part of a committed checkpoint."""
