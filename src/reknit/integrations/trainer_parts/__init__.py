"""What the doors for trainers are made of; users import nothing from here."""
