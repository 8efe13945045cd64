"""Put and get bytes: the only code that knows what a store is."""
