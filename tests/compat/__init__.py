"""Tests of the interfaces of other checkpoint libraries."""
