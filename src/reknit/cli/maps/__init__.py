"""Pictures of a checkpoint: its writers, its files, the cuts of its tensors, the reads of another layout."""
