"""Figures of one save or load: its phases as columns, its critical path, its throughput."""
