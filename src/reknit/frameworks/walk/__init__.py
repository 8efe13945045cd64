"""The walk through a state: it collects the contents to save, or the requests to a checkpoint."""
