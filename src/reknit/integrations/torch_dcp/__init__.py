"""The storage writer and reader of reknit for torch's DCP."""
