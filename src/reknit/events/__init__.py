"""Events: a record of every phase of every save and load, and where records go."""
