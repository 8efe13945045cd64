"""The trainer's side of a save that does not wait: prepare, stage, follow the agent."""
