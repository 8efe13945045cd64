"""The nouns of reknit: pure data and geometry; all packages may import them."""
