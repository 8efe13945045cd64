"""Work with other processes of this host: messages over a pair of sockets, and memory that both ends map."""
