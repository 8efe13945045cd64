"""What does this rank hold?  Training objects to shards and blobs, and back."""
