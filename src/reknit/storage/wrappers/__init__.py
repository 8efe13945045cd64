"""Stores around other stores."""
