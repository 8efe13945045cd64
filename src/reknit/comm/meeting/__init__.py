"""How ranks without a connection find each other."""
