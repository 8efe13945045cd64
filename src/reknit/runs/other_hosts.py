"""Remove old steps from a tier in memory on the hosts that rank 0 cannot see."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from reknit.engine.record.recognising import manifest_exists
from reknit.engine.stored.steps import is_step_name, step_name
from reknit.errors import ReknitError
from reknit.format import paths
from reknit.runs.agreement import ask_root
from reknit.storage.base import PerHost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reknit.comm.group import Group
    from reknit.runs.tiers import Level

logger = logging.getLogger("reknit")


class OtherHosts:
    """Removes files of steps that rank 0 has removed, in a store that each host has for itself.

    Rank 0 alone has the manifests, so it sends the names of the steps; one rank of each other host removes
    the files of all other steps.  Folders without the name of a step stay.
    """

    def __init__(self, group: Group, first: Level, timeout_s: float) -> None:
        tree = group.topology
        self._group, self._storage, self._timeout_s = group, first.storage, timeout_s
        self.apart = isinstance(first.storage, PerHost) and tree.num_hosts > 1
        """Whether hosts have files of the first tier that rank 0 cannot see."""
        self._asks = self.apart and first.keep is not None
        self._cleans = self._asks and tree.leads_host(group.rank) and group.rank != 0

    def surplus(self, needed: Callable[[], Iterable[int]]) -> list[str]:
        """Return the folders of removed steps whose files this rank has to remove.

        All ranks call this.  Rank 0 sends the steps that stay: the committed and the `needed` steps.
        """
        if not self._asks:
            return []

        def stay() -> list[str]:
            names = filter(is_step_name, self._storage.folders())
            committed = [name for name in names if manifest_exists(self._storage.sub(name))]
            return [*committed, *map(step_name, needed())]

        stays = set(ask_root(self._group, "hosts", self._timeout_s, stay))
        if not self._cleans:
            return []
        return [name for name in self._storage.folders() if is_step_name(name) and name not in stays]

    def remove(self, names: Sequence[str]) -> None:
        """Remove the files of steps from this host; log failures."""
        for name in names:
            folder = self._storage.sub(name)
            try:
                for listed in list(folder.list()):
                    if paths.parse_path(listed.path) is not None:
                        folder.delete(listed.path)
            except ReknitError as error:
                logger.warning("files of a removed step stay at %s: %s", folder.url, error)
