"""What is on disk: bytes in, nouns out, and back; nothing here knows where the bytes are stored."""
