"""When our runs pass the published values, and what a step took if those were cut off then."""

import pytest

from benchmarks.unfinished import agreeing, table


def a_run(curve, **changes):
    row = {
        "status": "done",
        "protocol": "replay",
        "average": 64,
        "task_points": 16,
        "depth": 5,
        "head_dim": 8,
        "batch": 256,
    }
    row |= {"epoch": 100, "positions": "none"}
    return {**row, "curve": curve, **changes}


FALLING = [
    1.0 - 0.01 * i for i in range(99)
]  # rank 8 with five layers: 0.02597 published, passed by the 99th epoch


def test_limit_over_the_steps_until_the_published_value_is_a_steps_time():
    (found,) = table([a_run(FALLING)])
    assert (found["figure"], found["epochs"], found["of"], found["published"]) == (
        "main figure",
        99,
        99,
        0.02597,
    )
    assert found["ms"] == pytest.approx(6 * 3600 * 1000 / (99 * 100 * 5))


def test_best_seed_counts_and_recipes_stay_apart():
    early, late = [1.0, 0.02, *FALLING[2:]], FALLING
    assert [found["epochs"] for found in table([a_run(late), a_run(early)])] == [2]
    both = table(
        [a_run(FALLING, depth=3, head_dim=32), a_run([0.05] * 9, depth=3, head_dim=32, batch=64)]
    )
    assert [(found["figure"], found["hours"], found["epochs"]) for found in both] == [
        ("its supplement, batch 64", 2, 1),
        ("main figure", 6, 96),
    ]
    (short,) = table([a_run([0.0064], task_points=4, depth=2, head_dim=64)])
    assert (short["figure"], short["hours"]) == ("sequence length, 4 points", 4)
    (placed,) = table([a_run([0.5, 0.48], depth=3, head_dim=1, average=8, positions="additive")])
    assert (placed["figure"], placed["hours"], placed["published"], placed["epochs"]) == (
        "positions, additive",
        4,
        0.4839,
        2,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol": "stream"},
        {"average": 8},
        {"status": "diverged"},
        {"head_dim": 3},
        {"curve": [1.0, 0.03]},
    ],
    ids=str,
)
def test_value_not_published_or_not_reached_is_left_out(changes):
    assert table([a_run(FALLING) | changes]) == []


def test_points_that_agree_if_runs_end_with_their_jobs():
    """Rank 8 with five layers: 0.02597 published, passed by the 98th epoch on the way to half of
    it."""
    falling, rank_1 = [*FALLING[:97], 0.026, 0.013], a_run([0.9, 0.42, 0.2], head_dim=1)  # 0.4224
    elsewhere = a_run([0.06], average=8)  # 0.06149, and no limit there
    rows = [
        a_run(falling),
        a_run([1.0] * 99),
        rank_1,
        elsewhere,
        a_run([0.0] * 9, protocol="stream"),
        a_run([0.0], depth=4),
    ]
    assert agreeing(rows) == ([(5, 8, 8)], [(5, 64, 1), (5, 64, 8)])
    one = 6 * 3.6e6 / (100 * 5)  # milliseconds for which one epoch is all
    assert agreeing(rows, one / 98.5, 0.0, one / 2.5) == ([(5, 8, 8), (5, 64, 1), (5, 64, 8)], [])
    assert agreeing(rows, one / 98.5) == ([(5, 8, 8), (5, 64, 8)], [(5, 64, 1)]), (
        "no limit at rank 1"
    )
    assert agreeing(rows, one / 90, 0.0, one / 2.5)[1] == [(5, 64, 8)], "too early"
    pooled = [a_run([0.05], depth=3, head_dim=32, batch=64), a_run([0.3], depth=3, head_dim=32)]
    assert agreeing(pooled) == ([(3, 64, 32)], []), "the better of two recipes: 0.05545"
    lost = a_run([0.06, None], average=8, status="diverged")
    assert agreeing([a_run([None], average=8, status="diverged")]) == ([], []), "there are none"
    assert agreeing([lost]) == ([(5, 8, 8)], []), "the smallest of whatever epochs there are"
    assert agreeing([a_run([0.9, 0.061, 0.01], head_dim=4)], 1.0, one / 2.5, 1.0) == (
        [(5, 64, 4)],
        [],
    ), "0.06109"
