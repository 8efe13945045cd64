"""The format on disk: encodes and decodes bytes, wherever they are stored."""
