"""`reknit show`: show the content of a checkpoint."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.cli.maps import layout_reads, target_layout
from reknit.cli.output import (
    count_text,
    print_fields,
    print_json,
    print_table,
    printable,
    readable,
    time_text,
    write_text,
)
from reknit.errors import UsageError, did_you_mean
from reknit.format.paths import parse_path
from reknit.integrations.formats.export import tensors_of
from reknit.plugins.events import amount
from reknit.plugins.format import full_name

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from reknit.cli.maps import TargetLayout
    from reknit.plugins.format import OpenCheckpoint, TensorEntry


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program."""
    parser = commands.add_parser(
        "show",
        help="show the content of a checkpoint",
        description="Show the commit record of a checkpoint, its items and its files; or its tensors. "
        "Only metadata is read.",
    )
    parser.add_argument("path", metavar="PATH", help="a checkpoint: a folder or URL")
    parser.add_argument(
        "--tensors",
        metavar="PATTERN",
        help="list the tensors whose name, or item/name, matches a shell pattern such as '*.weight'",
    )
    parser.add_argument(
        "--layout",
        metavar="LAYOUT",
        help="show the reads of a load into another layout: 4 (ranks), or axes such as tp=2,dp=2",
    )
    parser.add_argument(
        "--html", metavar="FILE", help="write a page with the writers, the cuts of tensors, and these reads"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show, and return the exit code."""
    layout = None if args.layout is None else target_layout(args.layout)
    if args.tensors is not None and (args.html is not None or layout is not None):
        raise UsageError(
            "--tensors lists tensors as text", remedy="leave --html and --layout out, or --tensors"
        )
    with tensors_of(args.path) as checkpoint:
        if args.html is not None:
            from reknit.cli.maps import map_page

            write_text(args.html, map_page(checkpoint, layout))
            print(f"wrote {args.html}: {len(checkpoint.index.tensors)} tensors")
        elif layout is not None:
            _show_reads(read_rows(checkpoint, layout), layout, as_json=args.json)
        elif args.tensors is not None:
            rows = tensor_rows(checkpoint, args.tensors)
            if not rows and (checkpoint.index.tensors or args.tensors != "*"):
                raise _nothing(checkpoint, args.tensors)
            _show_tensors(checkpoint, rows, args)
        elif args.json:
            print_json(summary(checkpoint))
        else:
            _show_summary(summary(checkpoint))
    return 0


def read_rows(checkpoint: OpenCheckpoint, layout: TargetLayout) -> list[dict[str, Any]]:
    """Return the reads of the ranks of a layout as plain data."""
    return [
        {
            "rank": each.rank,
            "name": layout.name(each.rank),
            "wanted_nbytes": each.wanted_nbytes,
            "read_nbytes": each.read_nbytes,
            "requests": each.num_reads,
            "files": [checkpoint.index.files[file] for file in np.flatnonzero(each.by_file).tolist()],
        }
        for each in layout_reads(checkpoint, layout)
    ]


def _show_reads(rows: list[dict[str, Any]], layout: TargetLayout, *, as_json: bool) -> None:
    if as_json:
        print_json(rows)
        return
    print(f"{layout.num_ranks} ranks: {layout}")
    heads = ("RANK", "WANTS", "READS", "REQUESTS", "FILES")
    cells = [
        (
            row["name"],
            amount(row["wanted_nbytes"]),
            amount(row["read_nbytes"]),
            row["requests"],
            len(row["files"]),
        )
        for row in rows
    ]
    print_table(heads, cells, right=heads[1:])
    if len(rows) < layout.num_ranks:
        print(f"and {layout.num_ranks - len(rows)} ranks between these")


def summary(checkpoint: OpenCheckpoint) -> dict[str, Any]:
    """Return the commit record, items and files as plain data.

    The elements and bytes of an item count tied weights once.
    """
    manifest = checkpoint.manifest
    tensors = Counter(entry.item for entry in checkpoint.index.tensors)
    numel: Counter[str] = Counter()
    for entry in _stored(checkpoint):
        numel[entry.item] += entry.spec.numel
    nbytes: Counter[str | None] = Counter()
    for file in manifest.files:
        name = parse_path(file.path)
        nbytes[None if name is None else name.item] += file.nbytes
    files = [{"path": file.path, "nbytes": file.nbytes} for file in manifest.files]
    if manifest.other is not None:
        files = [file for file in files if file["path"] != manifest.index_path]
        nbytes = Counter()
        for entry in _stored(checkpoint):
            nbytes[entry.item] += entry.spec.nbytes
    return {
        "path": checkpoint.storage.url,
        "format": "reknit" if manifest.other is None else manifest.other.kind,
        "format_version": manifest.format_version,
        "step": manifest.step,
        "created": manifest.created,
        "write_id": manifest.write_id,
        "uses_pickle": manifest.uses_pickle,
        "nbytes": manifest.nbytes,
        "origin": dict(manifest.origin),
        "metadata": dict(manifest.metadata),
        "items": [
            {"item": item, "tensors": tensors[item], "elements": numel[item], "nbytes": nbytes[item]}
            for item in manifest.items
        ],
        "unread": [{"entry": entry.name, "why": entry.why} for entry in manifest.unread],
        "files": files,
    }


def _stored(checkpoint: OpenCheckpoint) -> Iterator[TensorEntry]:
    """Yield the tensors without second names, which lie where another tensor lies."""
    index = checkpoint.index
    seen = set()
    for number, entry in enumerate(index.tensors):
        row = index.first[number]
        place = int(index.file[row]), int(index.start[row])
        if not entry.spec.numel or place not in seen:
            seen.add(place)
            yield entry


def tensor_rows(checkpoint: OpenCheckpoint, pattern: str) -> list[dict[str, Any]]:
    """Return the tensors that match as plain data; tied names have the same chunks."""
    index = checkpoint.index
    rows = []
    for number, entry in enumerate(index.tensors):
        if fnmatchcase(entry.fqn, pattern) or fnmatchcase(full_name(entry.item, entry.fqn), pattern):
            chunks = slice(index.first[number], index.first[number + 1])
            rows.append(
                {
                    "item": entry.item,
                    "fqn": entry.fqn,
                    "dtype": entry.spec.dtype,
                    "shape": list(entry.spec.shape),
                    "nbytes": entry.spec.nbytes,
                    "chunks": int(index.first[number + 1] - index.first[number]),
                    "files": [index.files[file] for file in np.unique(index.file[chunks]).tolist()],
                }
            )
    return rows


def _nothing(checkpoint: OpenCheckpoint, pattern: str) -> UsageError:
    """Return the error of a pattern that matches no tensor."""
    names = [full_name(*entry[:2]) for entry in checkpoint.index.tensors]
    meant = did_you_mean(pattern, [*names, *(entry.fqn for entry in checkpoint.index.tensors)])
    remedy = f"{meant + '  ' if meant else ''}it has {printable(_some(names))}; --tensors '*' lists all"
    return UsageError(
        f"no tensor of {checkpoint.storage.url} matches {pattern!r}",
        remedy=remedy if names else _no_tensors(checkpoint),
        path=checkpoint.storage.url,
    )


def _no_tensors(checkpoint: OpenCheckpoint) -> str:
    """Return a message about a checkpoint without tensors, with its items."""
    items = printable(", ".join(checkpoint.manifest.items)) or "no items"
    return f"it holds no tensors, only values: {items}"


def _show_tensors(checkpoint: OpenCheckpoint, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    if args.json:
        print_json(rows)
        return
    if not rows:
        print(f"{printable(checkpoint.storage.url)}: {_no_tensors(checkpoint)}")
        return
    print_table(
        ("TENSOR", "DTYPE", "SHAPE", "SIZE", "CHUNKS", "FILES"),
        [
            (
                f"{row['item']}/{row['fqn']}",
                row["dtype"],
                row["shape"],
                amount(row["nbytes"]),
                row["chunks"],
                _some(row["files"]),
            )
            for row in rows
        ],
        right=("SIZE", "CHUNKS"),
    )


def _some(files: list[str]) -> str:
    return ", ".join(files[:2]) + (f" and {len(files) - 2} more" if len(files) > 2 else "")


def _show_summary(facts: dict[str, Any]) -> None:
    fields = {
        "path": facts["path"],
        "step": "-" if facts["step"] is None else facts["step"],
        "created": f"{time_text(facts['created'])} UTC" if facts["created"] else "-",
        "size": amount(facts["nbytes"]),
        "format": facts["format_version"] if facts["format"] == "reknit" else facts["format"],
        "write id": facts["write_id"],
        "pickle": "yes: load it only if you trust where it comes from" if facts["uses_pickle"] else "no",
    }
    for part in ("origin", "metadata"):
        fields |= {f"{part}.{name}": readable(value) for name, value in facts[part].items()}
    print_fields({printable(name): value for name, value in fields.items()})
    print()
    print_table(
        ("ITEM", "TENSORS", "ELEMENTS", "SIZE"),
        [(i["item"], i["tensors"], count_text(i["elements"]), amount(i["nbytes"])) for i in facts["items"]],
        right=("TENSORS", "ELEMENTS", "SIZE"),
    )
    for entry in facts["unread"]:
        print(printable(f"cannot be read: {entry['entry']} ({entry['why']})"))
    print()
    print_table(("FILE", "SIZE"), [(f["path"], amount(f["nbytes"])) for f in facts["files"]], right=("SIZE",))
