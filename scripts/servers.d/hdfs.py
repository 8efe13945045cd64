"""A Hadoop cluster: one NameNode and DataNodes, real ones, of Hadoop 2.7.3.

Its jars come with a release of PySpark, some that they need from Debian; a Java runtime has to be there.
There is one DataNode, or as many as the environment variable HDFS_DATANODES says.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import sys
import tarfile
from pathlib import Path

from _process import free_ports, run, spawn

ABOUT = "Hadoop 2.7.3, a NameNode with DataNodes"
AFTER = ()
TIMEOUT_S = 120

PACKAGE = "pyspark==2.4.8"  # the last that brings both sides of HDFS
DEBIAN = (
    "libcommons-daemon-java",
    "libjersey1-core-java",
    "libjersey1-server-java",
    "libjersey1-servlet-java",
    "libjsr311-api-java",
)
JARS = re.compile(
    r"(activation|apacheds|api-|avro-1|commons-|curator|gson|guava|hadoop-(annotations|auth|common|hdfs)|htrace"
    r"|httpc|jackson-(core|mapper)-asl|javax\.servlet-api|jaxb-api|jetty|jsp-api|jsr305|leveldbjni|log4j|netty"
    r"|protobuf-java|slf4j|xbean|xercesImpl|xmlenc|zookeeper).*\.jar"
)
OPENED = ("java.lang", "java.util", "java.net", "java.io", "java.nio", "sun.nio.ch")
CLASSES = "org.apache.hadoop.hdfs.server"
PAIR = "pair"
"""The nameservice of two NameNodes."""


def install(home: Path) -> None:
    """Get the jars, all of them into one folder."""
    if shutil.which("java") is None:
        raise RuntimeError("it needs Java: apt-get install openjdk-17-jre-headless")
    wanted, told = " ".join((PACKAGE, *DEBIAN)), home / "installed"
    if told.exists() and told.read_text() == wanted:
        return
    downloads, jars = home / "downloads", home / "jars"
    downloads.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(jars, ignore_errors=True)
    jars.mkdir()
    _from_pyspark(downloads, jars)
    _from_debian(downloads, jars)
    for name in ("hdfs", "datanode", "secondary"):  # the pages of its web servers are not in the jars
        folder = home / "web/webapps" / name / "WEB-INF"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "web.xml").write_text("<web-app/>")
    shutil.rmtree(downloads)
    told.write_text(wanted)


def start(home: Path, running: dict[str, dict]) -> dict:
    """Start it, empty."""
    cluster = lay_out(home, home / "data", int(os.environ.get("HDFS_DATANODES", "1")))
    pids = [launch(cluster, node) for node in cluster["nodes"]]
    return {"pids": pids, "log": str(home / "data/log/namenode"), **cluster}


def ready(server: dict) -> None:
    """Return when the NameNode takes writes and knows all DataNodes."""
    state = jmx(server, "FSNamesystemState")
    found, wanted = state["NumLiveDataNodes"], len(server["nodes"]) - 1
    if state["FSState"] != "Operational" or found < wanted:
        raise RuntimeError(f"it is {state['FSState']} with {found} of {wanted} DataNodes")


def lay_out(home: Path, folder: Path, datanodes: int, **settings: str) -> dict:
    """Make the folders, the configuration and the empty name space of a new cluster in `folder`.

    What comes back is how to reach it, and in ``"nodes"`` the command of each process by its name.
    """
    rpc, http_port, *ports = free_ports(2 + 3 * datanodes)
    told = {
        "dfs.namenode.name.dir": (folder / "name").as_uri(),
        "dfs.namenode.rpc-address": f"127.0.0.1:{rpc}",
        "dfs.namenode.http-address": f"127.0.0.1:{http_port}",
    }
    java = prepare(home, folder, f"hdfs://127.0.0.1:{rpc}", told | settings)
    namenode = f"{CLASSES}.namenode.NameNode"
    run([*java, namenode, "-format", "-nonInteractive", "-force"], cwd=folder)
    nodes = {"namenode": [java[0], "-Xmx384m", *java[1:], namenode]} | datanodes_of(java, folder, ports)
    return {
        "endpoint": f"hdfs://127.0.0.1:{rpc}",
        "http": f"127.0.0.1:{http_port}",
        "conf": str(folder / "conf"),
        "folder": str(folder),
        "nodes": nodes,
    }


def lay_out_pair(home: Path, folder: Path, datanodes: int, **settings: str) -> dict:
    """Make what `lay_out` makes for two NameNodes, nn1 and nn2, that share a folder of edits.

    Both are standby when they start.  ``"admin"`` is the command that makes one the active one, up to its
    arguments, and ``"web"`` the addresses of their web servers.
    """
    rpc1, rpc2, http1, http2, *ports = free_ports(4 + 3 * datanodes)
    told = {
        "dfs.nameservices": PAIR,
        f"dfs.ha.namenodes.{PAIR}": "nn1,nn2",
        "dfs.namenode.shared.edits.dir": (folder / "shared").as_uri(),
        f"dfs.client.failover.proxy.provider.{PAIR}": "org.apache.hadoop.hdfs.server.namenode.ha."
        "ConfiguredFailoverProxyProvider",
        "dfs.ha.fencing.methods": "shell(/bin/true)",
        "dfs.ha.tail-edits.period": "1",  # else a standby would know of the others minutes later
        "dfs.ha.log-roll.period": "1",
    }
    for name, rpc, http_port in (("nn1", rpc1, http1), ("nn2", rpc2, http2)):
        told[f"dfs.namenode.rpc-address.{PAIR}.{name}"] = f"127.0.0.1:{rpc}"
        told[f"dfs.namenode.http-address.{PAIR}.{name}"] = f"127.0.0.1:{http_port}"
    java = prepare(home, folder, f"hdfs://{PAIR}", told | settings)
    nodes = {}
    for name in ("nn1", "nn2"):
        own = ["-D", f"dfs.ha.namenode.id={name}", "-D", f"dfs.namenode.name.dir={(folder / name).as_uri()}"]
        nodes[name] = [java[0], "-Xmx384m", *java[1:], f"{CLASSES}.namenode.NameNode", *own]
    run([*nodes["nn1"], "-format", "-nonInteractive", "-force"], cwd=folder)
    shutil.copytree(folder / "nn1", folder / "nn2")
    return {
        "endpoint": f"hdfs://{PAIR}",
        "web": {"nn1": f"127.0.0.1:{http1}", "nn2": f"127.0.0.1:{http2}"},
        "conf": str(folder / "conf"),
        "folder": str(folder),
        "nodes": nodes | datanodes_of(java, folder, ports),
        "admin": [*java, "org.apache.hadoop.hdfs.tools.DFSHAAdmin"],
    }


def prepare(home: Path, folder: Path, default: str, settings: dict[str, object]) -> list[str]:
    """Make the folders and the configuration of a new cluster, and return how Java is called with it."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("conf", "log", "tmp"):
        (folder / name).mkdir(parents=True)
    _configure(folder, default, settings)
    opened = [f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in OPENED]
    opened += [
        f"--add-{how}=java.security.jgss/sun.security.krb5=ALL-UNNAMED" for how in ("opens", "exports")
    ]
    classes = [folder / "conf", home / "web", *sorted((home / "jars").iterdir())]
    java = ["java", *opened, "-XX:+UseSerialGC", "-Djava.net.preferIPv4Stack=true"]
    java += [f"-Dhadoop.home.dir={home}", f"-Dhadoop.log.dir={folder / 'log'}"]
    return [*java, "-cp", ":".join(map(str, classes))]


def datanodes_of(java: list[str], folder: Path, ports: list[int]) -> dict[str, list[str]]:
    """Return the commands of DataNodes by name, one for each three ports."""
    nodes = {}
    for i in range(len(ports) // 3):
        own = {"data.dir": (folder / f"data{i}").as_uri()}
        for name, port in zip(("", "ipc.", "http."), ports[3 * i : 3 * i + 3], strict=True):
            own[f"{name}address"] = f"127.0.0.1:{port}"
        told = [word for name, value in own.items() for word in ("-D", f"dfs.datanode.{name}={value}")]
        nodes[f"datanode{i}"] = [java[0], "-Xmx256m", *java[1:], f"{CLASSES}.datanode.DataNode", *told]
    return nodes


def launch(cluster: dict, node: str) -> list[int]:
    """Start a process of a cluster, for the first time or again."""
    folder = Path(cluster["folder"])
    return spawn(cluster["nodes"][node], folder / "log" / node, cwd=folder)


def jmx(server: dict, bean: str) -> dict:
    """Return what the NameNode tells of itself under a name."""
    connection = http.client.HTTPConnection(server["http"], timeout=5)
    try:
        connection.request("GET", f"/jmx?qry=Hadoop:service=NameNode,name={bean}")
        answer = connection.getresponse()
        found = json.loads(answer.read())["beans"] if answer.status == 200 else []
    except (http.client.HTTPException, ValueError) as error:
        raise RuntimeError(f"{server['http']} answers {error!r}") from error
    finally:
        connection.close()
    if not found:
        raise RuntimeError(f"{server['http']} does not tell {bean} yet")
    return found[0]


def _configure(folder: Path, default: str, settings: dict[str, object]) -> None:
    core = {"fs.defaultFS": default, "hadoop.tmp.dir": folder / "tmp"}
    hdfs = {
        "dfs.replication": 1,
        "dfs.blocksize": 64 << 20,
        "dfs.namenode.fs-limits.min-block-size": 1 << 20,
        "dfs.namenode.safemode.extension": 0,
        "dfs.datanode.max.transfer.threads": 512,
        "dfs.webhdfs.enabled": "true",
        # Tests stop nodes: one that is silent for 3 s gets nothing to write, and after 14 s it is given up.
        "dfs.heartbeat.interval": 1,
        "dfs.namenode.heartbeat.recheck-interval": 2000,
        "dfs.namenode.stale.datanode.interval": 3000,
        "dfs.namenode.avoid.write.stale.datanode": "true",
        "dfs.namenode.avoid.read.stale.datanode": "true",
        **settings,
    }
    core |= {key: hdfs.pop(key) for key in list(hdfs) if key.startswith("hadoop.")}
    for name, values in (("core", core), ("hdfs", hdfs)):
        lines = (
            f"<property><name>{key}</name><value>{value}</value></property>" for key, value in values.items()
        )
        text = "\n".join(("<configuration>", *lines, "</configuration>"))
        (folder / "conf" / f"{name}-site.xml").write_text(text)
    (folder / "conf/hadoop-metrics2.properties").write_text("*.period=1\n")  # else 10 s, and jmx is as late
    (folder / "conf/log4j.properties").write_text(
        "log4j.rootLogger=INFO,out\nlog4j.appender.out=org.apache.log4j.ConsoleAppender\n"
        "log4j.appender.out.target=System.err\nlog4j.appender.out.layout=org.apache.log4j.PatternLayout\n"
        "log4j.appender.out.layout.ConversionPattern=%d{ISO8601} %p %c{2}: %m%n\n"
    )


def _from_pyspark(downloads: Path, jars: Path) -> None:
    if not (archive := downloads / f"{PACKAGE.replace('==', '-')}.tar.gz").exists():
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--disable-pip-version-check",
            "--no-input",
            "--quiet",
        ]
        run([*pip, "--no-deps", "--no-build-isolation", "--dest", str(downloads), PACKAGE])
    with tarfile.open(archive) as file:
        for member in file:
            name = member.name.rpartition("/")[2]
            if "/jars/" in member.name and JARS.fullmatch(name) and (source := file.extractfile(member)):
                with source, open(jars / name, "wb") as target:
                    shutil.copyfileobj(source, target)


def _from_debian(downloads: Path, jars: Path) -> None:
    download = ["apt-get", "download", "--quiet=2", *DEBIAN]
    try:
        run(download, cwd=downloads)
    except RuntimeError:  # a fresh machine knows no packages yet
        run(["apt-get", "update", "--quiet=2"])
        run(download, cwd=downloads)
    for package in downloads.glob("*.deb"):
        run(["dpkg", "-x", str(package), str(downloads / "debian")])
    for jar in (downloads / "debian/usr/share/java").glob("*.jar"):
        if not jar.is_symlink():  # it leads to a jar that is there as well
            shutil.copy(jar, jars)
