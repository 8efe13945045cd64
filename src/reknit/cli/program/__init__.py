"""The program as a whole: its command line, its versions."""
