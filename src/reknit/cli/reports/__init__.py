"""Commands that show what events tell."""
