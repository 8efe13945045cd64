"""The steps of a run: when to save, where to resume, which steps to keep, preemption."""
