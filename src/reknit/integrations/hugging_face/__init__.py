"""Hugging Face: files of safetensors, exports, and the names and layouts of its models."""
