"""The program as a whole: how it reads its command line, what its versions are, and where its output goes."""
