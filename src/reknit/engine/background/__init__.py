"""Background saves, carried out by processes that outlive the trainer."""
