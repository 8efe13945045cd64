"""Local disks, network file systems, and the memory of a host."""
