"""Graphs kept from arrival to sweep: nothing is forwarded twice for want of room, and what is held keeps its pages."""

import random

import pytest
import torch
from plain import VOCAB, batch, distance, interleave, make_rank, plain_gradient, trajectory
from ranks import in_processes, page_faults

from skyrl_thundersync.stream.sources import CloseGroup, CloseTrajectory, TrajectoryId


def talks(samples: int, turns: int) -> list:
    """Works of one group whose turns are 12 tokens each."""
    rng = random.Random(samples)
    prompt, works = tuple(rng.randrange(VOCAB) for _ in range(9)), []
    for sample in range(samples):
        works += trajectory(rng, "g", sample, prompt, [{"context": 5, "action": 7}] * turns)
        works.append(CloseTrajectory(TrajectoryId("g", sample), 1.0))
    return [*works, CloseGroup("g")]


def forwarded(rank, works) -> tuple[int, int]:
    """Tokens that a batch's segments have, beside the prompt's, and tokens that were forwarded for them."""
    lengths, done, forward = {}, 0, rank.segments.forward

    def counted(segment, grad):
        nonlocal done
        if not segment.shared:
            lengths[segment] = segment.ids_1n.shape[1]
            done += segment.ids_1n.shape[1]
        assert sum(rank.forest.budget.kept.values()) <= rank.forest.budget.budget
        return forward(segment, grad)

    rank.segments.forward = counted
    for work in works:
        rank.run(work)
    rank.segments.forward = forward
    return sum(lengths.values()), done


@pytest.mark.parametrize("accumulator", ["fp32", "exact"])
@pytest.mark.parametrize("seed", range(3))
def test_no_token_is_forwarded_twice_where_the_budget_is_full(folder_of, seed, accumulator):
    """Five open trajectories, room for the graphs of two; each is shorter than what one sweep may take at once."""
    works = interleave(talks(5, 2), seed)
    rank = make_rank(folder_of("qwen3"), block_tokens=10, retain_gib=1.0, dtype="float32", accumulator=accumulator)
    rank.forest.budget.budget = int(60 * rank.segments.graph_size.per_token)
    segments, done = forwarded(rank, works)
    assert segments == done == 5 * (7 + 12)
    plain, _ = plain_gradient(folder_of("qwen3"), works, torch.float32)
    assert distance(rank.gradient(), plain) <= 3e-6


@pytest.mark.parametrize("retain", [0.0, 1e-5])
def test_of_a_long_trajectory_all_but_the_last_piece_is_forwarded_early(folder_of, retain):
    """What no graph finds room for is forwarded for its state before the close, as the close would have to, and once more."""
    rank = make_rank(folder_of("qwen3"), block_tokens=10, retain_gib=retain)
    *turns, close, group = talks(1, 8)
    early = forwarded(rank, turns)
    pending = 7 + 12 * 7 - early[1]
    assert early[0] == early[1] and 0 < pending < 2 * rank.forest.budget.piece(10)
    late = forwarded(rank, [close, group])
    assert late[1] == 7 + 12 * 7  # each token once: the last piece's own, the others' again
    assert distance(rank.gradient(), plain_gradient(folder_of("qwen3"), [*turns, close, group])[0]) <= 1e-12


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text", "glm4_moe_lite"])
def test_gradients_are_the_same_whatever_finds_room(folder_of, family, seed):
    works = interleave(batch(seed, groups=2, samples=3), seed)
    plain, _ = plain_gradient(folder_of(family), works)
    rank = make_rank(folder_of(family), block_tokens=3, retain_gib=1.0)
    for tokens in (0, 6, 20):
        rank.forest.budget.budget = int(tokens * rank.segments.graph_size.per_token)
        for work in works:
            rank.run(work)
        assert distance(rank.gradient(), plain) <= 1e-12
        rank.abort_batch()


@pytest.mark.timeout(200)
def test_an_actors_batches_fault_no_page_in_again(folder_of):
    """A page of a graph that went back to the kernel comes back by a fault, each batch anew."""
    folder = folder_of("qwen3", intermediate_size=4096)
    ((faults, pages),) = in_processes(page_faults, folder, world=1)
    assert pages > 20_000
    assert max(faults[2:]) < 0.05 * pages
