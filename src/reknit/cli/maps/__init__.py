"""Pictures of a checkpoint: its writers, the cuts of its tensors, the reads of another layout."""
