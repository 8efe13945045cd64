"""Stores that are plug-ins: HDFS, and the file systems of fsspec."""
