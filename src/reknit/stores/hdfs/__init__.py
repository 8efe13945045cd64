"""HDFS, through its native client."""
