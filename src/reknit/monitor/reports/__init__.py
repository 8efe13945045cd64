"""Reports on saves and loads: made of the events that they wrote, on any number of ranks."""
