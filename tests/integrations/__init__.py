"""Tests of the doors for trainers, with the real packages."""
