"""Who moves which bytes?  Pure functions from holdings to plans: no I/O, no messages, no clock."""
