import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopformer import LoopformerError
from loopformer.config import ObjectiveConfig
from loopformer.training.batches import micro_batches, short_trajectory


@given(
    draws=st.integers(1, 4),
    share=st.integers(1, 6),
    world=st.sampled_from([1, 2, 3]),
    micro=st.integers(1, 9),
    fraction=st.sampled_from([0.25, 0.5, 0.7, 1.0]),
    in_step=st.booleans(),
)
def test_any_ranks_and_micro_batches_share_the_same_rows(
    draws: int, share: int, world: int, micro: int, fraction: float, in_step: bool
) -> None:
    batch = draws * share * world
    objective = ObjectiveConfig(route_draws=draws, short_fraction=fraction)
    rows: dict[int, tuple[int, bool]] = {}
    for rank in range(world):
        mine = micro_batches(batch, micro, objective, rank, world, in_step)
        assert sum(micro_batch.stop - micro_batch.start for micro_batch in mine) == batch // world
        for micro_batch in mine:
            assert micro_batch.stop - micro_batch.start <= micro
            for row in range(micro_batch.start, micro_batch.stop):
                assert row not in rows
                rows[row] = (micro_batch.part, row - micro_batch.start in micro_batch.short_rows)
    alone = {
        row: (micro_batch.part, row - micro_batch.start in micro_batch.short_rows)
        for micro_batch in micro_batches(batch, batch, objective)
        for row in range(micro_batch.start, micro_batch.stop)
    }
    assert rows == alone
    assert len(rows) == batch


def test_routes_follow_from_seed_step_and_part() -> None:
    objective = ObjectiveConfig()
    drawn = [short_trajectory(8, objective, 0, step, part) for step in range(5) for part in range(5)]
    assert drawn == [short_trajectory(8, objective, 0, step, part) for step in range(5) for part in range(5)]
    assert len(set(drawn)) > 10
    assert drawn != [short_trajectory(8, objective, 1, step, part) for step in range(5) for part in range(5)]
    assert short_trajectory(8, ObjectiveConfig(short_weight=0, consistency_weight=0), 0, 0, 0) is None


def test_uneven_shares_are_refused() -> None:
    with pytest.raises(LoopformerError, match="shared evenly by 3 ranks"):
        micro_batches(8, 2, ObjectiveConfig(route_draws=2), 0, 3)
    with pytest.raises(LoopformerError, match=r"12 rows of each of the 40 parts .* by 8 ranks"):
        micro_batches(480, 2, ObjectiveConfig(route_draws=40), 0, 8, in_step=True)
    assert {len(micro_batches(480, 12, ObjectiveConfig(route_draws=40), rank, 8)) for rank in range(8)} == {5}
