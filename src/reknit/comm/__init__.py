"""Talk between ranks: small messages only, every wait with a deadline."""
