"""Values that are no tensors, as bytes."""
