"""A checkpoint of another program becomes one of reknit, alone or with all ranks of a job."""

from __future__ import annotations

from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, NamedTuple

import reknit
from reknit.engine.stored.hints import no_checkpoint
from reknit.environment import launch
from reknit.errors import UsageError
from reknit.integrations.formats.open import read_foreign, store_of
from reknit.keywords import checked_call
from reknit.options import CommOptions
from reknit.plugins.format import check_absent, open_checkpoint, write_anew
from reknit.plugins.store import open_storage
from reknit.plugins.trainer import acting, manifest_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

    from reknit.plugins.trainer import Group


@contextmanager
def launched() -> Iterator[Group]:
    """Connect the processes that a launcher started, for the duration of the block; else be alone."""
    if launch() is None:
        yield reknit.alone()
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield acting(None, CommOptions()).group
    finally:
        dist.destroy_process_group()


class ImportReport(NamedTuple):
    """An imported checkpoint: `nbytes` and `num_files` count the files that this process wrote now.

    `num_kept` files were there from an earlier try.  `unchecked` has the missing checks of the other format.
    `unread` maps entries that reknit cannot read to the reason.
    """

    path: str
    source: str
    format: str
    step: int | None
    nbytes: int
    num_files: int
    num_kept: int
    num_tensors: int
    unchecked: str
    unread: dict[str, str]


@checked_call
def import_checkpoint(
    path: str | PathLike[str],
    to: str | PathLike[str],
    *,
    step: int | None = None,
    weights: str | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    group: Group | None = None,
) -> ImportReport:
    """Copy a checkpoint of another program to `to`, and commit it there as a checkpoint of reknit.

    `step` replaces the step that the other program recorded.  `weights` chooses a model in a folder of
    Hugging Face with several, by the file with which it begins, such as ``"model.safetensors"``.  `workers`
    threads copy at once.  All ranks of `group` call this together, and each copies a share.  Repeat the call
    after any failure.

    Raises `CheckpointNotFoundError` for a path without a checkpoint of another program that reknit reads,
    `CheckpointExistsError`, `FormatError`, `StorageError`.
    """
    if workers is not None and (type(workers) is not int or workers < 1):
        raise UsageError(f"workers is a number of threads from 1 on, not {workers!r}")
    with ExitStack() as last:
        source = last.enter_context(closing(open_checkpoint(path)))
        target = last.enter_context(closing(open_storage(to)))
        if source.url == target.url:
            raise UsageError(
                f"an import does not replace its source: {source.url}", remedy="name another folder"
            )
        check_absent(target, overwrite=overwrite)
        if (found := read_foreign(source, weights)) is None:
            if manifest_in(source) is not None:
                raise UsageError(f"{source.url} is a checkpoint of reknit", remedy="reknit promote copies it")
            raise no_checkpoint(source)
        other = found.manifest.other
        assert other is not None
        if found.rivals and weights is None:
            raise UsageError(
                f"{source.url} has different models, which begin with {' and '.join(found.rivals)}: "
                f"{dict(other.notes)[found.rivals[1]]}",
                remedy=f"choose one of them: --weights {found.rivals[0]}, or weights={found.rivals[0]!r}",
                path=source.url,
            )
        step = found.manifest.step if step is None else step
        done = write_anew(
            found,
            store_of(source, other),
            target,
            group=group or reknit.alone(),
            step=step,
            overwrite=overwrite,
            threads=workers,
        )
        return ImportReport(
            path=target.url,
            source=source.url,
            format=other.kind,
            step=step,
            **done._asdict(),
            num_tensors=len(found.index.tensors),
            unchecked=other.unchecked,
            unread={entry.name: entry.why for entry in found.manifest.unread},
        )
