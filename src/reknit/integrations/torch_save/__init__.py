"""Files of torch.save: read in place, and written as an export."""
