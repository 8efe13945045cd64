"""Loaders of torchdata, by the position of all their readers in the order of the samples."""
