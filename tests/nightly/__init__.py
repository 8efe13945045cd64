"""What takes too long for every change, or needs a machine of its own.  See scripts/nightly."""
