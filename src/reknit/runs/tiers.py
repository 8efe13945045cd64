"""The stores of a run, the fastest first, and the steps in them."""

from __future__ import annotations

import heapq
import logging
from dataclasses import dataclass, replace
from itertools import groupby
from numbers import Real
from typing import TYPE_CHECKING, NamedTuple, cast

from reknit.engine.stored.hints import refuse_other, warn_of_others
from reknit.engine.stored.notes import add_metrics
from reknit.engine.stored.recognising import manifest_exists
from reknit.engine.stored.run_record import Line, read_line
from reknit.engine.stored.steps import descending, is_step_name, numbered, step_name, steps_below
from reknit.errors import CheckpointNotFoundError, CorruptError, ReknitError, UsageError, shown
from reknit.format import paths
from reknit.keywords import checked_call
from reknit.locations import is_location, location_text
from reknit.options import PromotionTarget, SaveOptions, check_rate
from reknit.policies.keep_policies import ranked
from reknit.policies.save_policies import OnPreemption, every
from reknit.runs.agreement import ask_root
from reknit.runs.arguments import policy_for
from reknit.runs.cooling import Cool, Cooling
from reknit.runs.retention import Retention
from reknit.storage.base import PerHost
from reknit.storage.registry import open_storage, recipe

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from reknit.comm.group import Group
    from reknit.events.outlet import Outlet
    from reknit.options import Durability
    from reknit.policies.policy import KeepRule, Policy, SaveRule
    from reknit.storage.base import Storage
    from reknit.types.manifest import SavedStep

    Folder = tuple[int, str]
    """Number and name of the folder of a step."""


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


@checked_call
@dataclass(frozen=True, slots=True)
class Tier:
    """A store of a run, for `Checkpointer`.

    `every`, a number of steps or a policy, selects the steps that come here, by default every saved step.
    `keep` selects the steps that stay, by default all.  All ranks together copy to this tier at `bytes_per_s`
    or slower.  `cool` names the cold store to which old steps of this tier move.
    """

    root: str | os.PathLike[str]
    every: float | SaveRule | None = None
    keep: KeepRule | None = None
    bytes_per_s: float | None = None
    cool: Cool | None = None

    def __post_init__(self) -> None:
        if not is_location(self.root) or self.root == "":
            raise UsageError(f"the root of a tier is a path or a URL, not {shown(self.root)}")
        check_rate(self.bytes_per_s)
        if not isinstance(self.cool, (Cool, type(None))):
            raise UsageError(f"cool is a reknit.Cool, not {shown(self.cool)}")

    def when(self) -> Policy | None:
        """Return the policy of `every`.  Raises `UsageError`."""
        if self.every is None:
            return None
        a_number = isinstance(self.every, Real)
        return every(steps=self.every) if a_number else policy_for("save", self.every)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Level:
    """A tier that is open; `url` does not depend on the working folder."""

    url: str
    storage: Storage
    when: Policy | None
    keep: Policy | None
    bytes_per_s: float | None = None
    cool: Cool | None = None

    @classmethod
    def of(cls, tier: Tier, durability: Durability) -> Level:
        """Open a tier.  Raises `UsageError`, `StorageError`."""
        keep = None if tier.keep is None else policy_for("keep", tier.keep)
        storage = open_storage(tier.root, durability=durability)
        return cls(
            url=recipe(tier.root).url,
            storage=storage,
            when=tier.when(),
            keep=keep,
            bytes_per_s=tier.bytes_per_s,
            cool=tier.cool,
        )

    def newest(self, reached: int, line: Line) -> int | None:
        """Return the newest committed step of a line up to a number."""
        steps = (step for _, step in descending(self.storage, range(reached + 1)))
        return next((step.step for step in steps if _counts(step, line)), None)


def _counts(step: SavedStep, line: Line) -> bool:
    """Return whether a step can be read, and a run has not given it up."""
    return step.problem is None and line.holds(step.generation, step.step)


class FoundStep(NamedTuple):
    """A committed step: its number, the name of its folder, and the numbers of the tiers that have it.

    `generation` is that of its save, None if that cannot be read.  `problem` is the reason why its manifest
    cannot be read.
    """

    number: int
    name: str
    tiers: list[int]
    generation: int | None = None
    problem: str | None = None


class Tiers:
    """Finds the steps of a run in all of its tiers."""

    def __init__(self, levels: Sequence[Level]) -> None:
        self.levels = tuple(levels)
        self._warned = False

    @property
    def where(self) -> str:
        """All roots, for messages."""
        return " and ".join(level.url for level in self.levels)

    def line(self) -> Line:
        """Return the line of descent of the steps, as the run recorded it that opened a tier last."""
        return max((read_line(level.storage) for level in self.levels), key=lambda found: found[0])[1]

    def newest(self, before: Folder | None = None, *, damaged: bool = False) -> FoundStep | None:
        """Return the newest step of the run before a folder, from any tier.

        Steps whose manifest cannot be read are passed over with a warning, unless `damaged` ones count.
        """
        for found in self._descending(self._begun(self.line())):
            if before is None or (found.number, found.name) < before:
                if damaged or found.problem is None:
                    return found
                logger.warning("passed over step %d: %s", found.number, found.problem)
        if before is None:
            for level in self.levels:
                if not numbered(level.storage):
                    refuse_other(level.storage, of_run=True)
            if not (self._warned or damaged):  # a run that resumes is refused there
                self._warned = True
                for level in self.levels:
                    warn_of_others(level.storage)
        return None

    def numbered(self, number: int) -> FoundStep | None:
        """Return the step with a number, also one that the run gave up if it has no other."""
        line = self.line()
        for named in ((number,), None):  # a folder may have another name
            fallback = None
            for found in self._descending(Line(), named):
                if found.number == number:
                    if line.holds(found.generation, number):
                        return found
                    fallback = fallback or found
                elif found.number < number:
                    break
            if fallback is not None:
                return fallback
        return None

    def _begun(self, line: Line) -> Line:
        """Return the line of the newest branch that has a committed step."""
        while line.branches:
            steps = (step for _, tiers in self._folders(None) for step in tiers.values())
            newest = next((step for step in steps if _counts(step, line)), None)
            if newest is not None and line.is_begun(newest.generation, newest.step):
                break
            line = line.before()
        return line

    def _descending(self, line: Line, named: Collection[int] | None = None) -> Iterator[FoundStep]:
        """Yield the steps of a line, the newest first, with the tiers that have them."""
        for folder, tiers in self._folders(named):
            counting = {at: step for at, step in tiers.items() if step.problem or _counts(step, line)}
            if counting:
                step = next((step for step in counting.values() if step.problem is None), None)
                problem = None if step is not None else next(iter(counting.values())).problem
                yield FoundStep(*folder, [*counting], None if step is None else step.generation, problem)

    def _folders(self, named: Collection[int] | None) -> Iterator[tuple[Folder, dict[int, SavedStep]]]:
        """Yield the folders of steps of all tiers, the newest first, and their steps by tiers."""
        if len(self.levels) == 1:  # no step is read before it is asked for
            for number, step in descending(self.levels[0].storage, named):
                yield (number, step.path.rpartition("/")[2]), {0: step}
            return

        def of_tier(at: int) -> Iterator[tuple[Folder, int, SavedStep]]:
            for number, step in descending(self.levels[at].storage, named):
                yield (number, step.path.rpartition("/")[2]), at, step

        steps = heapq.merge(*map(of_tier, range(len(self.levels))), key=lambda found: found[0], reverse=True)
        for folder, found in groupby(steps, key=lambda found: found[0]):
            yield folder, {at: step for _, at, step in sorted(found, key=lambda each: each[1])}

    def find(self, step: int | str, before: Folder | None = None) -> FoundStep | None:
        """Return a step by its number, the best by ``"best"``, or the newest by ``"latest"``.

        By ``"newest"`` return the newest before a folder, also one whose manifest is damaged.
        """
        if step == "best":
            best = self.best()
            return None if best is None or best.step is None else self.numbered(best.step)
        if isinstance(step, int):
            return self.numbered(step)
        return self.newest(before, damaged=step == "newest")

    def missing(self, what: str) -> CheckpointNotFoundError:
        """Return the error for a step that no tier has."""
        root = self.levels[0].url
        return CheckpointNotFoundError(
            f"there is no {what} below {self.where}", path=root, remedy=f"look there: reknit ls {root}"
        )

    def unsound(self, paths: Sequence[str]) -> CorruptError:
        """Return the error for a run none of whose steps can be loaded; the newest comes first."""
        return CorruptError(
            f"none of the {len(paths)} steps below {self.where} can be loaded; the newest is {paths[0]}",
            path=self.levels[0].url,
            remedy="reknit verify shows the damage; to start from step 0, use another folder",
        )

    def steps(self) -> list[SavedStep]:
        """Return the steps of all tiers, ascending, each from the fastest tier that has it."""
        found: dict[tuple[int | None, str], SavedStep] = {}
        for level in self.levels:
            for step in steps_below(level.storage, of_run=True):
                key = step.step, step.path.rpartition("/")[2]
                faster = found.get(key)
                if faster is None or (faster.problem and not step.problem):
                    found[key] = step
                elif faster.write_id == step.write_id:
                    metrics = {**(step.metrics or {}), **(faster.metrics or {})}
                    found[key] = replace(faster, metrics=metrics)
        return sorted(
            found.values(), key=lambda step: (-1 if step.step is None else step.step, step.created, step.path)
        )

    def best(self) -> SavedStep | None:
        """Return the best step by the metric that the first `best` in a tier's `keep` names."""
        keeps = [level.keep for level in self.levels if level.keep is not None]
        whole = keeps[0] if keeps else None
        for keep in keeps[1:]:
            assert whole is not None
            whole = whole | keep
        steps = self.steps()
        line = self.line().begun([(step.generation, step.step) for step in steps])
        return next(iter(ranked(whole, [step for step in steps if _counts(step, line)])), None)

    def retentions(self, sinks: tuple[Outlet, ...], *, apart: bool) -> dict[int, Retention]:
        """Return the retentions of the tiers that do not keep all steps, by the numbers of the tiers.

        With `apart`, other hosts have files of the first tier.  `sinks` receive records of removals.
        """
        keeps = {tier: (level.storage, level.keep) for tier, level in enumerate(self.levels)}
        return {
            tier: Retention(storage, keep, apart=apart and tier == 0, sinks=sinks, line=self.line)
            for tier, (storage, keep) in keeps.items()
            if keep is not None
        }

    def coolings(self, sinks: tuple[Outlet, ...]) -> dict[int, Cooling]:
        """Return the coolings of tiers by the numbers of the tiers; `sinks` receive records of moves."""
        cools = {tier: (level.storage, level.cool) for tier, level in enumerate(self.levels)}
        return {
            tier: Cooling(storage, cool, sinks) for tier, (storage, cool) in cools.items() if cool is not None
        }

    def add_metrics(self, number: int, metrics: Mapping[str, float | None]) -> None:
        """Add metrics to a step in each tier that has it.  Raises `CheckpointNotFoundError`."""
        if (found := self.numbered(number)) is None:
            raise self.missing(f"step {number}")
        for tier in found.tiers:
            add_metrics(self.levels[tier].storage.sub(found.name), metrics)

    def save_options(
        self, options: object, name: str, tiers: Sequence[int], *, sure: bool
    ) -> SaveOptions | None:
        """Return the options of a save to the folder of a step, which goes to folders of its name in `tiers`.

        Without tiers, these folders are below the roots in `promote_to`.  A save that has to be `sure` is
        never skipped: somebody demands it, or the run ends soon.
        """
        if not isinstance(options, SaveOptions | None):  # the save raises the error
            return cast("SaveOptions", options)
        options = options or SaveOptions()
        levels = [self.levels[tier] for tier in tiers]
        targets = [PromotionTarget(level.url, level.bytes_per_s) for level in levels] or options.promotions
        places = tuple(replace(target, path=below(location_text(target.path), name)) for target in targets)
        busy = "wait" if sure else options.when_busy
        return replace(options, promote_to=places or None, when_busy=busy)

    def close(self) -> None:
        """Close all stores."""
        for level in self.levels:
            level.storage.close()


def opened(tiers: object, durability: Durability) -> Tiers:
    """Open tiers.  Raises `UsageError` if they are not a list of tiers, or do not fit each other."""
    if not isinstance(tiers, (list, tuple)) or not tiers or not all(isinstance(t, Tier) for t in tiers):
        raise UsageError(
            f"tiers is a list of reknit.Tier, the fastest first, not {shown(tiers)}",
            remedy='for instance tiers=[Tier("mem://run"), Tier("/nvme/run", every=10)]',
        )
    if tiers[0].bytes_per_s is not None:
        raise UsageError("saves write to the first tier at full rate: it has no bytes_per_s")
    found = Tiers([Level.of(tier, durability) for tier in tiers])
    urls = [level.storage.url for level in found.levels]
    urls += [level.cool.url for level in found.levels if level.cool is not None]
    if twice := [url for at, url in enumerate(urls) if url in urls[:at]]:
        raise UsageError(f"two tiers have one root, {twice[0]}")
    notices = [set(_notices(level.when)) for level in found.levels]
    if unheard := [level for level, own in zip(found.levels, notices, strict=True) if own - notices[0]]:
        raise UsageError(
            f"the tier {unheard[0].url} waits for a notice that the first tier does not watch for",
            remedy="give the same on_preemption(...) to `every` of the first tier, which is saved first",
        )
    return found


def _notices(policy: Policy | None) -> list[OnPreemption]:
    leaves = () if policy is None else policy.leaves()
    return [leaf for leaf in leaves if isinstance(leaf, OnPreemption)]


def below(root: str, name: str) -> str:
    """Return the place of a folder below a path or a URL, which may have options."""
    place, mark, options = root.partition("?") if "://" in root else (root, "", "")
    return f"{place.rstrip('/')}/{name}{mark}{options}"
