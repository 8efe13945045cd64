"""Move the bytes: carry plans out, and never ask back."""
