"""The calls of users, each in a module that imports nothing for other calls."""
