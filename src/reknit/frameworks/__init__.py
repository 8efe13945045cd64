"""What a rank holds: training objects become shards and blobs, and are filled from a checkpoint."""
