"""The format on disk: encodes and decodes bytes, and does not know where they are stored."""
