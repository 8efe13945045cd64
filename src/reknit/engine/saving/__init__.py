"""One save: the holdings of a rank become part of a committed checkpoint."""
