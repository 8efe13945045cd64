"""The calls of users, each in a module that imports only what the call needs."""
