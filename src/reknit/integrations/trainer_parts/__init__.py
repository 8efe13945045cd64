"""The parts of the doors for trainers; users import nothing from here."""
