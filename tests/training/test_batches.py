import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopformer import LoopformerError
from loopformer.config import ObjectiveConfig
from loopformer.training.batches import pieces, short_trajectory


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
        mine = pieces(batch, micro, objective, rank, world, in_step)
        assert sum(piece.stop - piece.start for piece in mine) == batch // world
        for piece in mine:
            assert piece.stop - piece.start <= micro
            for row in range(piece.start, piece.stop):
                assert row not in rows
                rows[row] = (piece.part, row - piece.start in piece.short_rows)
    alone = {
        row: (piece.part, row - piece.start in piece.short_rows)
        for piece in pieces(batch, batch, objective)
        for row in range(piece.start, piece.stop)
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
        pieces(8, 2, ObjectiveConfig(route_draws=2), 0, 3)
    with pytest.raises(LoopformerError, match=r"12 rows of each of the 40 parts .* by 8 ranks"):
        pieces(480, 2, ObjectiveConfig(route_draws=40), 0, 8, in_step=True)
    assert {len(pieces(480, 12, ObjectiveConfig(route_draws=40), rank, 8)) for rank in range(8)} == {5}
