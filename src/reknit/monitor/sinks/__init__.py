"""Where records of phases go."""
