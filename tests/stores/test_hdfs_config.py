"""Which cluster does a URL of HDFS mean, by Hadoop's own configuration?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reknit.errors import ReknitError, UsageError
from reknit.stores.hdfs.config import HdfsOptions, cluster, parse_url

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    monkeypatch.setenv("HADOOP_USER_NAME", "ann")
    return tmp_path


def write(folder: Path, name: str, **values: str) -> None:
    lines = (
        f"<property><name>{key.replace('__', '-').replace('_', '.')}</name><value>{value}</value></property>"
        for key, value in values.items()
    )
    (folder / f"{name}-site.xml").write_text(f"<configuration>{''.join(lines)}</configuration>")


def test_without_any_configuration_the_url_names_the_namenode(conf: Path) -> None:
    for authority, address in (
        ("nn:9000", ("nn", 9000)),
        ("nn", ("nn", 8020)),
        ("[::1]:9000", ("::1", 9000)),
        ("[::1]", ("::1", 8020)),
    ):
        place = parse_url(f"hdfs://{authority}/runs/one/?part_mib=8&timeout_s=3")
        assert place.folder == "/runs/one"
        assert place.url == f"hdfs://{authority}/runs/one"
        assert place.options == HdfsOptions(part_nbytes=8 << 20, timeout_s=3.0)
        found = cluster(place)
        assert (found.namenodes, found.secure, found.user) == ((address,), False, "ann")


def test_a_nameservice_has_several_namenodes(conf: Path) -> None:
    write(conf, "core", fs_defaultFS="hdfs://ns1", hadoop_security_authentication="kerberos")
    write(
        conf,
        "hdfs",
        dfs_ha_namenodes_ns1="a, b",
        own_host="first",
        dfs_namenode_rpc__address_ns1_a="${own.host}:8021",
        dfs_namenode_rpc__address_ns1_b="second:8022",
    )
    place = parse_url("hdfs:///runs")
    assert place.url == "hdfs://ns1/runs"
    found = cluster(place)
    assert found.namenodes == (("first", 8021), ("second", 8022))
    assert found.secure


def test_what_makes_no_sense_is_refused(conf: Path) -> None:
    for url in (
        "hdfs:///x",
        "hdfs://",
        "hdfs://nn/a/../b",
        "hdfs://nn/x?color=red",
        "hdfs://nn/x?part_mib=much",
        "hdfs://nn/x?part_mib=0",
        "hdfs://nn/x?part_mib=8&block_mib=4",
        "hdfs://nn/x?concat=webhdfs",
        "hdfs://nn/x?concat=sometimes",
        "hdfs://nn/x?tries=0",
        "hdfs://nn/x?timeout_s=0",
        "hdfs://nn/x?concurrency=0",
        "hdfs://nn/x?replication=0",
    ):
        with pytest.raises(ReknitError):
            parse_url(url)
    with pytest.raises(UsageError):
        cluster(parse_url("hdfs://nn:port/x"))
    write(conf, "hdfs", dfs_ha_namenodes_ns1="a,b", dfs_namenode_rpc__address_ns1_a="first:8021")
    with pytest.raises(UsageError, match="a, b"):
        cluster(parse_url("hdfs://ns1/x"))
    (conf / "core-site.xml").write_text("<configuration>")
    with pytest.raises(UsageError, match=r"core-site\.xml"):
        parse_url("hdfs:///x")


def test_a_part_is_never_larger_than_a_block(conf: Path) -> None:
    options = parse_url("hdfs://nn/x?part_mib=256").options
    assert options.part_nbytes == options.block_nbytes == 256 << 20
