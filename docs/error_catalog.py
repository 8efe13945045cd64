"""The usual causes of each public error, and the remedies: the source of the page of errors.

The code of an error is the name of its class, which every traceback shows, and its meaning is the docstring
of the class.  Pages are relative to `docs/`.
"""

from __future__ import annotations

import inspect
from typing import NamedTuple

from reknit import errors
from reknit.errors import ReknitError


class Explanation(NamedTuple):
    """The usual causes of an error, the remedies in the order in which to try them, and further pages."""

    causes: tuple[str, ...]
    remedies: tuple[str, ...]
    pages: tuple[str, ...] = ()


CATALOG: dict[str, Explanation] = {
    "ReknitError": Explanation(
        causes=(
            "An error of Python or of a library has no narrower type here; the message begins with its type.",
            "Another rank raised an error of a type that this version does not have.",
        ),
        remedies=(
            "Read the message and the error below it in the traceback, which is the cause.",
            "Catch a narrower type where a handler can act, and this one for everything else.",
        ),
        pages=("troubleshooting.md",),
    ),
    "UsageError": Explanation(
        causes=(
            "An argument or an option has a wrong type or value, or has no meaning in this call.",
            "Ranks of one job made the same call with different options.",
            "The command line names a combination that cannot be carried out.",
        ),
        remedies=(
            "Correct the call as the message says; nothing was read or written.",
            "Look up the options of the call: a table shows the calls that use each option.",
        ),
        pages=("reference/options.md", "reference/api.md"),
    ),
    "StateError": Explanation(
        causes=(
            "A value in the state has a type that is not stored, such as an iterator or your own class.",
            "An optimizer is in the state without its module, or only its state dict is.",
            "Ranks hold different values of a tensor that they should hold alike.",
            "A tensor is on the meta device, or was replaced behind the back of its wrapper.",
        ),
        remedies=(
            "Change the entry that the message names: put the object itself into the state, or leave it out.",
            "Wrap values that differ between ranks on purpose in `PerRank`, and random states in `RngState`.",
        ),
        pages=("troubleshooting.md#saving", "howto/per-rank-state.md"),
    ),
    "KeywordError": Explanation(
        causes=(
            "The keyword is misspelt, or belongs to another call.",
            "A field of `SaveOptions` or `LoadOptions` was passed beside `options`, not inside them.",
            "The script was written for an earlier version.",
        ),
        remedies=("Pass the keyword that the message shows.", "Compare the changelog for renamed keywords."),
        pages=("reference/options.md", "reference/api.md"),
    ),
    "UnknownSchemeError": Explanation(
        causes=(
            "The URL has a typo before `://`.",
            "The store is one of fsspec or of a package that is not installed here.",
            "The name of a local folder looks like a URL.",
        ),
        remedies=(
            "Correct the scheme, or install the package that brings it.",
            "Pass a local folder by its absolute path.",
            "Register the scheme of a store of your own.",
        ),
        pages=("howto/storage-fsspec.md", "howto/storage-your-own.md"),
    ),
    "MissingExtraError": Explanation(
        causes=(
            "The call needs a client or a framework that is not installed.",
            "The package is installed for another Python, or cannot be imported.",
        ),
        remedies=(
            "Install the extra that the message names, such as `pip install 'reknit[s3]'`.",
            "Check with `reknit --version` which packages this Python has.",
        ),
        pages=("howto/command-line.md",),
    ),
    "CheckpointNotFoundError": Explanation(
        causes=(
            "The path is a folder of checkpoints, not one of them.",
            "The save was killed, failed or is still running, so it has no manifest yet.",
            "The step was removed by a rule of the run, or is on another store.",
        ),
        remedies=(
            "List the checkpoints with `reknit ls FOLDER`, or find the newest with `reknit.latest`.",
            "Give the path of the checkpoint itself, the folder with `manifest.json`.",
        ),
        pages=("troubleshooting.md#loading", "howto/other-formats.md"),
    ),
    "CheckpointExistsError": Explanation(
        causes=(
            "The step was saved before, and `overwrite` is false.",
            "The folder of a run has steps from which this run has not resumed.",
        ),
        remedies=(
            "Give each step a folder of its own, or pass `overwrite=True`; the old one stays until then.",
            "Call `resume` of the `Checkpointer` first, or use another folder.",
        ),
        pages=("troubleshooting.md#saving", "howto/checkpointer.md"),
    ),
    "FormatError": Explanation(
        causes=(
            "A file is not of the format that its place suggests, or is of another program.",
            "A checkpoint of another program holds data that cannot be read, such as an encrypted archive.",
        ),
        remedies=(
            "Check the path with `reknit ls` and `reknit verify`.",
            "Compare the files of other programs with the table of formats that can be opened.",
        ),
        pages=("format.md", "howto/other-formats.md"),
    ),
    "VersionError": Explanation(
        causes=("A newer reknit wrote the checkpoint, with a feature that this one does not have.",),
        remedies=(
            "Install the version that wrote it, or a newer one, which reads all earlier formats too.",
            "Compare the format that `reknit --version` prints.",
        ),
        pages=("releases.md", "format.md"),
    ),
    "CorruptError": Explanation(
        causes=(
            "A copy did not finish, or left files out.",
            "A disk, a network or a program has changed bytes after the save.",
            "Files of two checkpoints were mixed.",
        ),
        remedies=(
            "List all damage with `reknit verify PATH --data`; tensors outside it can still be read.",
            "Copy the named files again, or load another checkpoint or a replica.",
            "If the message says that the target is partly written, load again before you go on.",
        ),
        pages=("howto/verify-a-checkpoint.md", "troubleshooting.md#loading"),
    ),
    "MismatchError": Explanation(
        causes=(
            "A name, shape or dtype of the target is not the one of the checkpoint.",
            "The model or its optimizer was changed since the save, or is another one.",
            "The names of two frameworks differ, and no transform maps them.",
        ),
        remedies=(
            "Compare the lines of the message with `reknit show PATH --tensors '*'`.",
            "Restore the part that fits with `reknit.load(..., strict=False)` or a list of patterns.",
            "Map names and layouts with `transforms`, or dtypes with `LoadOptions(cast=True)`.",
        ),
        pages=("howto/partial-and-lenient-loading.md", "howto/transforms.md", "troubleshooting.md#loading"),
    ),
    "DroppedError": Explanation(
        causes=("A rule such as `policies.without` removed the item of an old step, to save space.",),
        remedies=(
            "Load the other items: leave this one out of the target.",
            "Load a newer step that still has the item, which `reknit ls` shows.",
        ),
        pages=("howto/clean-up.md",),
    ),
    "CommitError": Explanation(
        causes=(
            "The state of a rank is incomplete, and a tensor has a hole; or two ranks wrote the same part.",
            "One name stands for tensors of different shapes or dtypes on different ranks.",
            "The files of the save were deleted while it was under way.",
            "Ranks write to stores that are not the same: a local folder of each host, for instance.",
        ),
        remedies=(
            "Look at the tensor or file that the message names, and at the state of that rank.",
            "Save again; the earlier checkpoint is still there.",
        ),
        pages=("troubleshooting.md#saving", "reliability.md"),
    ),
    "FencedError": Explanation(
        causes=(
            "The scheduler has started the job again, and this process is left from the earlier run.",
            "Two jobs save into one folder.",
            "The clock of the host of the new run is behind.",
        ),
        remedies=(
            "End this process if it was replaced: the other run counts.",
            "Give each run a folder of its own if both are wanted.",
            "Pass the count of restarts as `CommOptions(generation=...)` where clocks differ.",
        ),
        pages=("troubleshooting.md#saving", "decisions/0007-fencing.md"),
    ),
    "AgentError": Explanation(
        causes=(
            "The kernel or a scheduler killed the process that writes, mostly for lack of memory.",
            "The agent of another rank has ended, so that the save cannot become whole.",
            "The process changed its user or its root folder after its agent had started.",
        ),
        remedies=(
            "Save again: new agents start by themselves.",
            "Look for `oom` in the log of the kernel; lower `SaveOptions.host_nbytes` or raise the limit.",
            "Save with `wait=True` where processes cannot be started.",
        ),
        pages=("troubleshooting.md#saving-without-waiting", "howto/async.md"),
    ),
    "SkippedError": Explanation(
        causes=("The job saves faster than the store writes, and `when_busy` is `skip`.",),
        remedies=(
            "Accept it: the next save that finds memory free is written.",
            "Save less often, raise `host_nbytes`, or wait with `SaveOptions(when_busy='wait')`.",
        ),
        pages=("howto/async.md", "howto/tuning.md"),
    ),
    "StorageError": Explanation(
        causes=(
            "The store returned an error that has no narrower type, such as a fault of a disk.",
            "The path goes through a link whose target is gone, or which no save may write through.",
            "An endpoint, a region or a bucket is wrong.",
        ),
        remedies=(
            "Read the text of the store in the message.",
            "Test the store by itself: `reknit certify-storage URL`.",
        ),
        pages=("howto/storage-s3.md", "howto/storage-nfs.md", "troubleshooting.md#saving"),
    ),
    "StorageNotFoundError": Explanation(
        causes=(
            "The folder or the bucket does not exist, or its name has a typo.",
            "Another program removed the file between the listing and the read.",
        ),
        remedies=("Correct the name, or create the bucket.", "Check the checkpoint with `reknit verify`."),
        pages=("howto/storage-s3.md", "howto/verify-a-checkpoint.md"),
    ),
    "StorageFullError": Explanation(
        causes=("The disk is full, or a quota is used up.", "Files of killed saves take the space."),
        remedies=(
            "Remove the files of killed saves: `reknit gc FOLDER`, then with `--delete`.",
            "Remove old steps: `reknit prune FOLDER --keep-last 3`, or `keep` of a `Checkpointer`.",
            "Save elsewhere, or raise the quota.",
        ),
        pages=("howto/clean-up.md", "howto/sizing.md"),
    ),
    "StoragePermissionError": Explanation(
        causes=(
            "The credentials of this process are missing, expired or of another account.",
            "The folder belongs to another user, or is read-only.",
            "The policy of the bucket refuses one of the calls: put, get, list or delete.",
        ),
        remedies=(
            "Give the rights that the page of the store lists.",
            "Test them before the training starts: `reknit certify-storage URL`.",
        ),
        pages=(
            "howto/storage-s3.md",
            "howto/storage-gcs.md",
            "howto/storage-azure.md",
            "howto/storage-hdfs.md",
        ),
    ),
    "StorageUnavailableError": Explanation(
        causes=(
            "The store is overloaded, restarts, or a network between it and this host is broken.",
            "The address of the endpoint is wrong.",
        ),
        remedies=(
            "Save or load again; requests were repeated already, until the deadline.",
            "Lower `threads`, or raise `timeout_s`, if the store is only slow.",
            "Count the repeated requests in `reknit report`.",
        ),
        pages=("howto/tuning.md", "howto/events-and-phases.md"),
    ),
    "UndecidedError": Explanation(
        causes=("The store answered neither the commit nor the requests to rule it out.",),
        remedies=(
            "Look for the checkpoint when the store answers again: it is whole if it is there.",
            "Save again, to this path or another; nothing that was there before is lost.",
            "Leave its files where they are, or let `reknit gc` rule the commit out and remove them.",
        ),
        pages=("reliability.md", "howto/clean-up.md"),
    ),
    "ShortageError": Explanation(
        causes=(
            "A limit of the container or of the shell: memory, processes or open files.",
            "Other programs take the memory of the host, or the training takes that of the device.",
            "Python is about to end, and starts nothing more.",
        ),
        remedies=(
            "Raise the limit that the message names (`ulimit -v`, `-u`, `-n`, the memory of the container).",
            "Take less: fewer `threads`, a smaller `inflight_nbytes` or `host_nbytes`.",
            "Call before the program ends, and not in a function of `atexit`.",
        ),
        pages=("troubleshooting.md#memory-threads-open-files", "howto/sizing.md"),
    ),
    "CommError": Explanation(
        causes=(
            "The process of another rank ended, so that its connection broke.",
            "A rank listens at an address that the others cannot reach, or a firewall is between them.",
            "The process group of torch failed.",
        ),
        remedies=(
            "Look at the end of the log of the rank that the message names.",
            "Choose the network with `CommOptions(interface=...)`.",
            "Start the job again from the last checkpoint.",
        ),
        pages=("troubleshooting.md#several-ranks", "howto/connect.md"),
    ),
    "DeadlineError": Explanation(
        causes=(
            "Only some ranks made the call, such as inside `if rank == 0`.",
            "A rank stopped, or is much slower than the others.",
            "A store or a device hangs.",
        ),
        remedies=(
            "Make the call on every rank, each with its own part of the state.",
            "Look at the logs of the ranks that the message names, and at the phase.",
            "Raise `timeout_s` of the options, or `CommOptions.connect_timeout_s`, if they are only slow.",
        ),
        pages=("troubleshooting.md#several-ranks", "howto/tuning.md"),
    ),
    "GroupClosedError": Explanation(
        causes=("A rank called `close` or ended its program, and another rank went on with saves or loads.",),
        remedies=(
            "Make the same calls on every rank, and `close` after the last of them.",
            "Look in the log of the rank that left.",
        ),
        pages=("howto/connect.md",),
    ),
    "ProtocolError": Explanation(
        causes=(
            "Some ranks save while others load, or one rank made more calls than the others.",
            "Ranks run different versions of reknit, or different programs.",
        ),
        remedies=(
            "Make the same calls in the same order on every rank.",
            "Compare `reknit --version` on the hosts.",
            "Pass a process group with only the ranks that make the call.",
        ),
        pages=("troubleshooting.md#several-ranks", "howto/connect.md"),
    ),
}


def codes() -> list[str]:
    """Return the codes of all public errors, in the order of the tree."""
    return [
        name
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, ReknitError) and not name.startswith("_")
    ]


def error_lines(code: str) -> list[str]:
    """Return the section of an error in Markdown."""
    found, kind = CATALOG[code], getattr(errors, code)
    parents = [base.__name__ for base in inspect.getmro(kind)[1:] if issubclass(base, ReknitError)]
    lines = [f"## {code}", "", *inspect.cleandoc(kind.__doc__).split("\n"), ""]
    if parents:
        lines += [f"Also caught as {', '.join(f'`{parent}`' for parent in parents)}.", ""]
    for title, texts in (("Usual causes", found.causes), ("What to do", found.remedies)):
        lines += [f"*{title}.*", "", *(f"- {text}" for text in texts), ""]
    pages = ", ".join(f"[](../{page})" for page in found.pages)
    return [*lines, f"*More.* {pages}", ""]
