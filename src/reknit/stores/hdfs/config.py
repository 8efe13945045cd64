"""HDFS configuration: URLs, their options, and Hadoop's own files."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args
from xml.etree import ElementTree

from reknit.environment import hadoop_conf_dir, hadoop_user
from reknit.errors import UsageError
from reknit.options import MIB, Durability
from reknit.plugins.store import check_path, require, url_options

Concat = Literal["auto", "rpc", "webhdfs", "none"]

DEFAULT_PORT = 8020
_VARIABLE = re.compile(r"\$\{([^${}]+)\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class HdfsOptions:
    """Options of an HDFS; each can be set in the URL, after a question mark.

    `part_nbytes` (in a URL ``part_mib``): size of one sub-file; files of at most one part are written
    directly.  `block_nbytes` (``block_mib``): HDFS block size of new files, at least a part.  `concurrency`:
    sub-files of one file in flight at once, and ranges of one read.  `replication`: copies of each block,
    None for the cluster's default.  `timeout_s`: longest time for one request, or for one piece of 4 MiB.
    `tries`: how often a sub-file is written before the write fails, each time under a new name.

    `concat`: how sub-files are joined: ``"rpc"`` asks the NameNode, ``"webhdfs"`` a web server at the address
    `webhdfs`; ``"none"`` writes each file as one stream, of which nothing can be repeated.  ``"auto"``:
    ``"webhdfs"`` if `webhdfs` is set, else ``"rpc"`` if the cluster has no authentication, else ``"none"``.
    `principal`, `keytab`: for Kerberos without a ticket cache.
    """

    part_nbytes: int = 32 * MIB
    block_nbytes: int = 128 * MIB
    concurrency: int = 8
    replication: int | None = None
    timeout_s: float = 30.0
    tries: int = 4
    concat: Concat = "auto"
    webhdfs: str | None = None
    principal: str | None = None
    keytab: str | None = None

    def __post_init__(self) -> None:
        require(self.part_nbytes >= 1, "a part has at least one byte")
        require(
            self.part_nbytes <= self.block_nbytes,
            f"a part of {self.part_nbytes} bytes is larger than a block of {self.block_nbytes}",
        )
        require(self.concurrency >= 1, "concurrency is at least 1")
        require(self.replication is None or self.replication >= 1, "replication is at least 1")
        require(self.timeout_s > 0, "timeout_s must be positive")
        require(self.tries >= 1, "tries is at least 1")
        known = get_args(Concat)
        require(self.concat in known, f"concat is one of {', '.join(known)}, not {self.concat!r}")
        require(
            self.concat != "webhdfs" or self.webhdfs is not None,
            "concat=webhdfs needs the address of a web server, such as webhdfs=http://namenode:9870",
        )


@dataclass(frozen=True, slots=True)
class HdfsPath:
    """The place in a URL: a cluster (``host:port``, or a nameservice), and an absolute folder."""

    authority: str
    folder: str
    options: HdfsOptions
    durability: Durability = "power"

    @property
    def url(self) -> str:
        """As a user would write it, without options."""
        return f"hdfs://{self.authority}{self.folder}".rstrip("/")


@dataclass(frozen=True, slots=True)
class Cluster:
    """The NameNodes of a cluster as (host, port), and whether it authenticates its clients.

    `names` are the names of the NameNodes in a nameservice, in the same order; empty without a nameservice.
    `datanodes_by_name`: DataNodes are reached by their names, not by the addresses that the NameNode sees.
    """

    namenodes: tuple[tuple[str, int], ...]
    secure: bool
    user: str
    names: tuple[str, ...] = ()
    datanodes_by_name: bool = False


def parse_url(url: str, durability: Durability = "power") -> HdfsPath:
    """Return the place and the options of ``hdfs://host:port/folder?option=value``.  Raises `UsageError`."""
    head, _, query = url.partition("?")
    authority, _, folder = head.partition("://")[2].partition("/")
    if not authority:
        setting = configuration().get("fs.defaultFS", "")
        authority = setting.partition("://")[2].partition("/")[0] if setting.startswith("hdfs://") else ""
    if not authority:
        raise UsageError(
            f"{url!r} names no cluster, and Hadoop's configuration has no fs.defaultFS",
            remedy="write hdfs://namenode:8020/folder, or set HADOOP_CONF_DIR",
        )
    folder = folder.strip("/")
    if folder:
        check_path(folder, f"hdfs://{authority}")
    found = url_options(url, query, HdfsOptions, keytab=os.path.expanduser)
    if "part_nbytes" in found:
        found.setdefault("block_nbytes", max(HdfsOptions().block_nbytes, found["part_nbytes"]))
    return HdfsPath(authority, f"/{folder}" if folder else "", HdfsOptions(**found), durability)


def cluster(place: HdfsPath) -> Cluster:
    """Return the NameNodes of a place, with the settings for requests to them."""
    known, authority = configuration(), place.authority
    setting = known.get(f"dfs.ha.namenodes.{authority}", "").strip()
    nodes = [node.strip() for node in setting.split(",")] if setting else []
    addresses = [known.get(f"dfs.namenode.rpc-address.{authority}.{node}", "") for node in nodes]
    addresses = addresses or [authority]
    if not all(addresses):
        raise UsageError(
            f"Hadoop's configuration lacks the address of a NameNode of {authority}: {', '.join(nodes)}",
            remedy=f"set dfs.namenode.rpc-address.{authority}.<node> in hdfs-site.xml",
        )
    secure = known.get("hadoop.security.authentication", "simple").lower() != "simple"
    by_name = known.get("dfs.client.use.datanode.hostname", "").lower() == "true"
    return Cluster(tuple(map(_address, addresses)), secure, hadoop_user(), tuple(nodes), by_name)


def configuration() -> dict[str, str]:
    """Return the settings in core-site.xml and hdfs-site.xml, with their variables filled in."""
    found: dict[str, str] = {}
    if (folder := hadoop_conf_dir()) is not None:
        for name in ("core-site.xml", "hdfs-site.xml"):
            path = Path(folder, name)
            try:
                root = ElementTree.parse(path).getroot()
            except FileNotFoundError:
                continue
            except (ElementTree.ParseError, OSError) as error:
                raise UsageError(f"cannot read {path}: {error}", remedy="mend it") from error
            for entry in root.iter("property"):
                key, value = entry.findtext("name"), entry.findtext("value")
                if key and value is not None:
                    found[key.strip()] = value.strip()
    return {key: _filled(value, found) for key, value in found.items()}


def _filled(text: str, known: dict[str, str]) -> str:
    for _ in range(20):  # as deep as Hadoop goes
        new = _VARIABLE.sub(lambda match: known.get(match[1], match[0]), text)
        if new == text:
            break
        text = new
    return text


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        return text.strip("[]"), DEFAULT_PORT
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"{text!r} is not the address of a NameNode", remedy="write host:port")
    return host.strip("[]"), int(port)
