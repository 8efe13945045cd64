"""What ranks find imported: a module for each set of frameworks, since some change torch for good."""
