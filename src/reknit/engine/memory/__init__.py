"""Host memory of saves and loads, and the threads that work with it."""
