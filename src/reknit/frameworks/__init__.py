"""The objects of training frameworks as shards and blobs, and how a checkpoint fills them."""
