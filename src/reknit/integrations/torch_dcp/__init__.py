"""The storage writer and reader for torch.distributed.checkpoint."""
