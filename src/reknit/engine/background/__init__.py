"""Saves that go on while training does, in processes that outlive the trainer."""
