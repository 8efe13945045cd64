"""A private cluster of HDFS, whose start takes seconds: one for all tests that kill or stop its nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.stores.hdfs_probes import Cluster


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield three DataNodes, and a NameNode that does not notice a silent one within a test."""
    from tests.stores.hdfs_probes import running

    settings = {
        "dfs.namenode.avoid.write.stale.datanode": "false",
        "dfs.namenode.heartbeat.recheck-interval": "600000",
        "dfs.namenode.replication.considerLoad": "false",  # a node that falls silent at work would look busy
    }
    with running(tmp_path_factory.mktemp("hdfs"), datanodes=3, **settings) as found:
        yield found
