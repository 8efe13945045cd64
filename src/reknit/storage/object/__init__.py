"""S3 and what is compatible with it, Google Cloud Storage, Azure Blob Storage."""
