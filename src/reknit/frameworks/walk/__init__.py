"""Walk through a state: gather what it holds, or what it needs of a checkpoint."""
