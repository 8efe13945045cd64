"""What deserves attention, and how somebody hears of it."""
