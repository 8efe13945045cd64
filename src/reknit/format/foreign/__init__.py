"""Files of other programs: bytes to nouns, without running any of their code."""
