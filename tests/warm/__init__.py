"""The imports of ranks: a module for each set of frameworks, since some change torch for good."""
