"""The numbers, defaults, flags and fields that the pages give are those of the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import Any

from reknit.cli import main
from reknit.events.records import PhaseRecord, StorageRecord
from tests.docs.pages import ROOT

MIB, GIB, MINUTE, HOUR, DAY = 1 << 20, 1 << 30, 60.0, 3600.0, 86_400.0

# By page: its text, the place of the number in src/reknit/, and the number.
NUMBERS: dict[str, list[tuple[str, str, float]]] = {
    "howto/async.md": [
        ("if they have more than 64 KiB", "engine/background/snapshot.py:SMALL_NBYTES", 64 << 10),
        ("64 bytes of each 4 KiB", "engine/memory/elements.py:LINE_NBYTES", 64),
        ("of at least 4160 bytes in a row", "engine/memory/elements.py:STRIDE_NBYTES", 4160 - 64),
        ("waits for them for at most 30 s", "engine/background/session.py:_NEW_AGENTS_S", 30),
        ("gives up after `timeout_s` (300 s)", "api/stored.py:latest.timeout_s", 300),
        ("waits up to `exit_wait_s` (300 s)", "options/__init__.py:SaveOptions.exit_wait_s", 300),
        ("60 s after the longest `timeout_s`", "engine/background/agent.py:_GRACE_S", MINUTE),
        ("the agents run with nice 10", "engine/background/agent.py:_LOW_NICE", 10),
    ],
    "howto/checkpointer.md": [
        ("about every two seconds", "runs/agreement.py:_ROUND_EVERY_S", 2),
        ("of each host every five seconds", "runs/preemption.py:POLL_S", 5),
        ("when they are an hour old", "storage/local/folders.py:STALE_S", HOUR),
        ("after five minutes (`lease_s`)", "runs/watch.py:watch.lease_s", 5 * MINUTE),
    ],
    "howto/clean-up.md": [("have not changed for a day", "cli/gc.py:add_parser.--older-than", DAY)],
    "howto/command-line.md": [
        ("in its first thousand files", "engine/stored/hints.py:MOST_FOREIGN", 1000),
        ("Of more than 64 ranks", "cli/maps.py:MOST_RANKS", 64),
        ("the 300 largest tensors", "cli/maps.py:_MOST_TENSORS", 300),
        ("and the 100 largest files", "cli/maps.py:_MOST_FILES", 100),
        ("in more than 2,000 chunks", "cli/maps.py:_MOST_CHUNKS", 2000),
        ("keeps a million events", "monitor/dash.py:_MOST_EVENTS", 1_000_000),
        ("a summary of a thousand older", "monitor/dash.py:_MOST_PAST", 1000),
    ],
    "howto/connect.md": [
        ("of at least 16 characters", "comm/meeting/address_store.py:_SHORTEST_TOKEN", 16),
        ("report to one rank (16)", "options/__init__.py:CommOptions.fan_out", 16),
        ("`connect_timeout_s` (120)", "options/__init__.py:CommOptions.connect_timeout_s", 120),
        ("and 64 more", "comm/serving.py:SPARE_CONNECTIONS", 64),
    ],
    "howto/events-and-phases.md": [
        ("At most 16,384 records wait", "events/outlet.py:CAPACITY", 16_384),
        ("up to half a second later", "events/outlet.py:_LINGER_S", 0.5),
        ("waits up to ten seconds for a reader", "monitor/duckdb.py:_BUSY_S", 10),
        ("waits for a writer in the same way", "monitor/files.py:_BUSY_S", 10),
        ("more than 1.5 times as long", "monitor/text.py:SLOW_RATIO", 1.5),
        ("must also exceed 0.05 s", "monitor/text.py:SLOW_S", 0.05),
        ("and 2 % of the whole", "monitor/text.py:SLOW_SHARE", 0.02),
        ("if it exceeds 5 ms", "monitor/storage_figures.py:_LEAST_BEHIND_S", 0.005),
        ("50,000 divided by", "cli/report.py:_RANK_MTTF_H", 50_000),
        ("takes longer than two seconds", "events/progress.py:Intervals.quiet_s", 2),
        ("every ten seconds;", "events/progress.py:Intervals.log_s", 10),
        ("the last 2,000 saves and loads", "monitor/page.py:_MOST_OPERATIONS", 2000),
        ("The last 300 have a summary", "monitor/page.py:_MOST_FIGURED", 300),
        ("as fit into 3 MB", "monitor/page.py:_DETAIL_LETTERS", 3_000_000),
        ("at most 24 phases by name", "monitor/figures.py:MOST_LANES", 24),
        ("and 120,000 bars", "monitor/page.py:_MOST_BARS", 120_000),
    ],
    "howto/export-to-hugging-face.md": [
        ("default 5 GB", "integrations/hugging_face/export.py:MAX_SHARD_NBYTES", 5e9)
    ],
    "howto/gpus.md": [
        ("`wait=False` | 8 MiB: they", "engine/memory/devices.py:PIECE_NBYTES", 8 * MIB),
        ("copied together, 64 MiB at a time", "engine/memory/devices.py:GATHER_NBYTES", 64 * MIB),
        ("of up to 64 KiB that no", "engine/background/snapshot.py:SMALL_NBYTES", 64 << 10),
        ("in total at most 64 MiB", "engine/background/snapshot.py:_CLONES_NBYTES", 64 * MIB),
        ("about 12 MiB for a moment", "engine/memory/elements.py:LOT_LINES", 1 << 16),
        ("converted, on the device | 8 MiB", "engine/memory/elements.py:LAID_NBYTES", 8 * MIB),
        ("two buffers of up to 32 MiB", "engine/sharing/host_exchange.py:BUCKET_NBYTES", 32 * MIB),
    ],
    "howto/load-into-another-layout.md": [("blocks of 4 MiB", "format/checksum.py:BLOCK_NBYTES", 4 * MIB)],
    "howto/load.md": [
        ("shows the first 20 problems", "planner/tiling.py:SHOWN", 20),
        ("less than 1.5 GB/s, four below 2.25", "engine/sharing/shared_read.py:_COPY_RATE", 1.5e9 * 2),
        ("and many below 3 GB/s", "engine/sharing/shared_read.py:_COPY_RATE", 3e9),
        ("Less than 32 MiB per rank", "planner/sharing.py:WORTH_NBYTES", 32 * MIB),
        ("`inflight_nbytes` (256 MiB)", "options/__init__.py:LoadOptions.inflight_nbytes", 256 * MIB),
    ],
    "howto/per-rank-state.md": [("the first 8 KiB", "engine/saving/part.py:SAMPLE_NBYTES", 8 << 10)],
    "howto/save-and-load.md": [("may be nested 64 deep", "types/shard.py:MAX_DEPTH", 64)],
    "howto/storage-hdfs.md": [
        ("the default port is 8020", "stores/hdfs/config.py:DEFAULT_PORT", 8020),
        ("unfinished files after a day", "stores/hdfs/store.py:_STALE_S", DAY),
        ("for ten minutes", "stores/hdfs/upload.py:_AVOIDED_S", 10 * MINUTE),
        ("After 64 such calls", "stores/hdfs/client.py:_MOST_LATE", 64),
        ("cached for five seconds", "stores/hdfs/reading.py:_KEPT_S", 5),
        ("| `part_mib` | 32 |", "stores/hdfs/config.py:HdfsOptions.part_nbytes", 32 * MIB),
        ("| `block_mib` | 128 |", "stores/hdfs/config.py:HdfsOptions.block_nbytes", 128 * MIB),
        ("| `concurrency` | 8 |", "stores/hdfs/config.py:HdfsOptions.concurrency", 8),
        ("| `timeout_s` | 30 |", "stores/hdfs/config.py:HdfsOptions.timeout_s", 30),
        ("| `tries` | 4 |", "stores/hdfs/config.py:HdfsOptions.tries", 4),
        ("| `retry_s` | 120 |", "storage/wrappers/retrying.py:RetryPolicy.deadline_s", 120),
    ],
    "howto/storage-nfs.md": [("when they are an hour old", "storage/local/folders.py:STALE_S", HOUR)],
    "howto/storage-s3.md": [
        ("| `part_mib` | 8 |", "storage/object/client.py:ObjectOptions.part_nbytes", 8 * MIB),
        ("one read; at least 5.", "storage/object/client.py:_SMALLEST_PART", 5 * MIB),
        ("at most 10,000 parts", "storage/object/upload.py:MAX_PARTS", 10_000),
        ("| `concurrency` | 8 |", "storage/object/client.py:ObjectOptions.concurrency", 8),
        ("time of a part at 128 KiB/s", "storage/object/client.py:_SLOWEST", 128 << 10),
        ("| `retries` | 20 |", "storage/object/client.py:ObjectOptions.retries", 20),
        ("within three minutes", "storage/object/client.py:_LONGEST_S", 3 * MINUTE),
        ("other requests at most four times", "storage/object/client.py:_FEW", 4),
        ("| `retry_s` | 120 |", "storage/wrappers/retrying.py:RetryPolicy.deadline_s", 120),
        ("takes the lock over after a minute", "storage/object/conditions.py:_LOCK_STALE_S", MINUTE),
    ],
    "howto/storage-your-own.md": [
        ("retried for two minutes", "storage/wrappers/retrying.py:RetryPolicy.deadline_s", 120),
        ("then one per minute", "storage/wrappers/retrying.py:_SILENT_S", MINUTE),
        ("files of up to 16 MiB", "storage/wrappers/retrying.py:_KEPT_NBYTES", 16 * MIB),
    ],
    "howto/tiers.md": [("to several stores (up to 8)", "engine/background/lanes.py:_MOST", 8)],
    "reference/options.md": [("the first 8 KiB of copies", "engine/saving/part.py:SAMPLE_NBYTES", 8 << 10)],
    "reliability.md": [
        ("Every block of 4 MiB", "format/checksum.py:BLOCK_NBYTES", 4 * MIB),
        ("more than 32 dimensions", "types/shard.py:MAX_NDIM", 32),
    ],
    "troubleshooting.md": [("After 5 s, the ranks named last", "comm/round_errors.py:NOTICE_S", 5)],
}


@cache
def page(name: str) -> str:
    """Return the text of a page, in one line."""
    return " ".join((ROOT / "docs" / name).read_text().split())


@cache
def tree(path: str) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse((ROOT / "src" / "reknit" / path).read_text())


def bindings(node: Any) -> dict[str, ast.expr]:
    """Return the constants of a module, the fields of a class, or the defaults of a function, by name."""
    if isinstance(node, ast.FunctionDef):
        pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        return {arg.arg: default for arg, default in pairs if default is not None}
    found = {}
    for child in node.body:
        targets = getattr(child, "targets", [getattr(child, "target", None)])
        if (
            isinstance(child, (ast.Assign, ast.AnnAssign))
            and isinstance(targets[0], ast.Name)
            and child.value
        ):
            found[targets[0].id] = child.value
        elif isinstance(child, ast.FunctionDef) and child.name == "__init__":
            found |= bindings(child)
    return found


def number(expression: ast.expr, names: dict[str, ast.expr]) -> float:
    """Return the value of an expression of numbers and constants, or the default of an option."""
    if isinstance(expression, ast.Call):
        return number(expression.args[0], names)
    if isinstance(expression, ast.Name) and expression.id in names:
        return number(names[expression.id], names)
    if isinstance(expression, ast.BinOp):
        sides = [ast.Constant(number(side, names)) for side in (expression.left, expression.right)]
        expression = ast.BinOp(sides[0], expression.op, sides[1])
    known = {"MIB": MIB, "GIB": GIB}
    value: float = eval(compile(ast.fix_missing_locations(ast.Expression(expression)), "", "eval"), known)
    return value


def in_source(place: str) -> float:
    """Return the number at a place such as `module.py:NAME`, `module.py:Class.field` or of an option."""
    path, name = place.split(":")
    module = tree(path)
    if ".--" in name:
        from reknit.cli.gc import age

        text = (ROOT / "src" / "reknit" / path).read_text()
        flag = re.escape(name.split(".")[1])
        found = re.search(rf'"{flag}",.*?default="(\w+)"', text, re.DOTALL)
        assert found is not None, place
        return age(found[1])
    outer, _, inner = name.rpartition(".")
    nodes = [n for n in module.body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == outer]
    return number(bindings(nodes[0] if outer else module)[inner], bindings(module))


def test_the_numbers_on_a_page_are_those_of_the_code() -> None:
    found = [(name, *each) for name, numbers in NUMBERS.items() for each in numbers]
    assert [(name, says) for name, says, _, _ in found if says not in page(name)] == []
    real = [(place, value, in_source(place)) for _, _, place, value in found]
    assert [(place, value, here) for place, value, here in real if here != value] == []


def test_commands_print_json_but_for_those_that_the_page_names() -> None:
    (said,) = re.findall(r"commands print JSON, except (.*?)\.", page("howto/command-line.md"))
    (groups,) = (action for action in main.parser()._actions if action.dest == "command")
    assert isinstance(groups.choices, dict)
    without = {name for name, one in groups.choices.items() if "--json" not in flags(one)}
    assert set(re.findall(r"`([\w-]+)`", said)) == without


def flags(parser: Any) -> set[str]:
    """Return the options of a command, and of the commands below it."""
    found = set()
    for action in parser._actions:
        found |= set(action.option_strings)
        if isinstance(action.choices, dict):
            found |= set().union(*map(flags, action.choices.values()))
    return found


def test_the_lines_of_events_have_the_fields_that_the_page_lists() -> None:
    _, text = (ROOT / "docs/howto/events-and-phases.md").read_text().split("has the fields of `PhaseRecord`")
    listed = [
        name for line in re.findall(r"^- (.*)$", text.split("The last line")[0], re.M) for name in named(line)
    ]
    assert sorted(listed) == sorted(PhaseRecord.__struct_fields__)
    (said,) = re.findall(r"has the fields of `StorageRecord`\.(.*?)\.\s", page("howto/events-and-phases.md"))
    (more,) = re.findall(r"The other fields are (.*?), and rank", page("howto/events-and-phases.md"))
    shown = {*named(said), *named(more)} - {"write", "read", "commit", "s3://bucket", "file"}
    assert shown <= set(StorageRecord.__struct_fields__)


def named(text: str) -> list[str]:
    """Return the names in a text up to its first colon, all names without a colon."""
    return re.findall(r"`([^`]+)`", text.partition(":")[0])


def test_the_page_about_options_names_every_environment_variable() -> None:
    source = (ROOT / "src/reknit/environment.py").read_text()
    used = set(re.findall(r'environ(?:\.get\(|\[)"(REKNIT_\w+)"', source))
    (said,) = re.findall(r"Three environment variables (.*?)\. \[The page", page("reference/options.md"))
    assert set(re.findall(r"`(REKNIT_\w+)`", said)) == used


def test_the_exit_codes_of_the_page_are_those_of_the_program() -> None:
    _, section = (ROOT / "docs/howto/command-line.md").read_text().split("## Exit codes\n")
    listed = [int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)]
    names = (main.OK, main.DIFFERENT, main.USAGE, main.NOT_FOUND, main.FAILED, main.SHORT)
    assert listed == [*names, main.UNWRITTEN, main.INTERRUPTED, main.PIPE_CLOSED]
