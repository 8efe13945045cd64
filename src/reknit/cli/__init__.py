"""What can a person at a terminal do with checkpoints?"""
