"""The numbers of the planning benchmark come from complete jobs, and from bytes that were really sent."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import pytest

from benchmarks.planning import loads, root
from benchmarks.planning.jobs import Fsdp2, Megatron, Model
from benchmarks.planning.tree import climb, rank_of
from reknit.engine.saving.coordinator import Coordinator
from tests.running.examples import is_night

if TYPE_CHECKING:
    from benchmarks.planning.jobs import Job
    from benchmarks.planning.tree import Climbed


def saved(reported: Climbed) -> dict[str, float]:
    """Let the root assemble the index, which fails unless every tensor is covered exactly."""
    return root.save(Coordinator(), reported.claims.at_root, reported.receipts.at_root)


def test_the_ranks_of_the_megatron_job_hold_405b_parameters_without_a_hole() -> None:
    for dp in (1, 3) if is_night() else (1,):
        job = Megatron(dp)
        shapes = {
            s.fqn: s.spec.shape for rank in range(job.ranks) for s in job.shards(rank) if s.item == "model"
        }
        assert sum(map(prod, shapes.values())) == pytest.approx(405.8e9, rel=0.001), dp
        reported = climb(job, silent=False)
        assert saved(reported)["chunks"] == reported.num_chunks, dp


def test_all_ranks_save_the_same_twice_and_the_second_time_they_tell_less() -> None:
    cases: list[Job] = [Fsdp2(24, 3, 4), Fsdp2(5, 2, 1)]
    for job in cases:
        reported, coordinator = climb(job, silent=True), Coordinator()
        first = root.save(coordinator, reported.claims.at_root, reported.receipts.at_root)
        again = root.save(coordinator, reported.claims.at_root, reported.silent.at_root)
        assert first["index_nbytes"] == again["index_nbytes"], job
        assert first["chunks"] == again["chunks"] == job.ranks * len(job.shards(0))
        assert reported.silent.nbytes < reported.receipts.nbytes, job


def test_bytes_up_the_tree_are_those_of_all_messages_but_the_root_s_own() -> None:
    job = Fsdp2(4, 2, 1)  # one host: every rank is right below the root
    reported = climb(job, silent=False)
    sent = sum(len(rank_of(job, rank, silent=False).receipt) for rank in range(1, 4))
    up = reported.receipts.reported()
    assert up["up_in_all_nbytes"] == up["into_root_nbytes"] == up["largest_fan_in_nbytes"] == sent


def test_ranks_of_a_load_read_every_byte_that_is_wanted_once_and_only_with_sharing() -> None:
    job = Megatron(2, 2, 2, Model(layers=4, hidden=4096, kv=512, ffn=8192, words=32_000))
    source = loads.saved(climb(job, silent=False))
    loading = loads.load(job, source, workers=1)
    wanted = sum(source.file_nbytes.values())
    assert sum(source.written_nbytes) == wanted
    assert loading.unique_nbytes == sum(loading.shared_nbytes) == pytest.approx(wanted, rel=0.01)
    assert sum(loading.alone_nbytes) > 1.1 * wanted  # both data-parallel ranks want all parameters
    assert max(loading.shared_nbytes) < max(loading.alone_nbytes)
    assert sum(loading.first_nbytes) == pytest.approx(wanted, rel=0.001)
