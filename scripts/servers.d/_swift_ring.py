"""Write down that one disk has everything of one kind in a Swift cluster: FILE, PORT and DEVICE."""

from __future__ import annotations

import sys

sys.path.pop(0)  # this folder, in which a file is called swift too

from swift.common.ring import RingBuilder

file, port, device = sys.argv[1:]
builder = RingBuilder(2, 1, 0)
here = {"ip": "127.0.0.1", "port": int(port), "replication_ip": "127.0.0.1", "replication_port": int(port)}
builder.add_dev({"region": 1, "zone": 1, "weight": 1.0, "device": device, "meta": "", **here})
builder.rebalance()
builder.get_ring().save(file)
