"""Files of NumPy and GGUF: read in place, and .npz written as an export."""
