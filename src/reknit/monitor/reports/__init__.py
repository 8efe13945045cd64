"""Reports on saves and loads, from the events of any number of ranks."""
