"""Tests that take too long for every change, or need a machine of their own.  See scripts/nightly."""
