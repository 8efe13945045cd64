"""The record of a checkpoint: what is at a path, who may commit there, the commit, and notes about it."""
