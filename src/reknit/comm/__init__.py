"""Messages between ranks: only small messages, every wait with a deadline."""
