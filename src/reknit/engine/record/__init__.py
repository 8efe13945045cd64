"""The record of a checkpoint: manifest, markers, the commit, and notes; and the records of runs."""
