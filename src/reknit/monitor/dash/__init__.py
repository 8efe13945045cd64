"""The report of saves and loads while they run, for a browser."""
