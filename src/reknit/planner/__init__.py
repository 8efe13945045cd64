"""Pure functions from holdings to plans of who moves which bytes: no I/O, no messages, no clock."""
