"""Words over a group: the group's axioms, labels against plain permutations, words the same for any cut."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from loopformer.config import DataConfig
from loopformer.data.generated import open_data
from loopformer.data.loader import IGNORE_INDEX
from loopformer.data.states import (
    GROUPS,
    TEST,
    TRAIN,
    VALIDATION,
    Group,
    StateLoader,
    StateWindows,
    cycles,
)
from loopformer.errors import LoopformerError

SIZES = {"S3": 6, "A5": 60, "S5": 120}


@pytest.fixture(scope="module", params=GROUPS)
def group(request: pytest.FixtureRequest) -> Group:
    return Group.named(request.param)


def test_the_axioms_of_a_group(group: Group) -> None:
    table, ids = group.table, np.arange(len(group))
    assert len(group) == len(set(group.elements)) == len(set(group.names)) == SIZES[group.name]
    assert (table[0] == ids).all()
    assert (table[:, 0] == ids).all()
    assert (np.sort(table, 0) == ids[:, None]).all()  # so every element has an inverse
    assert (np.sort(table, 1) == ids).all()
    assert (table[table[:, :, None], ids] == table[ids[:, None, None], table]).all()  # (x·y)·z = x·(y·z)


def test_a_product_is_first_the_left_then_the_right() -> None:
    group = Group.named("S3")
    ids = {name: number for number, name in enumerate(group.names)}
    assert list(ids) == ["()", "(23)", "(12)", "(123)", "(132)", "(13)"]
    # 1 goes to 2 by (12) and from there to 3 by (23); 3 goes to 2, 2 to 1.
    assert group.names[group.table[ids["(12)"], ids["(23)"]]] == "(132)"
    assert cycles((1, 0, 3, 4, 2)) == "(12)(345)"


def test_labels_are_products_of_permutations(group: Group) -> None:
    batch = StateLoader(group, context=10, batch=5, seed=3).batch(step=2)
    assert (batch.inputs[:, 0] == group.tokenizer.eot).all()
    assert (batch.targets[:, 0] == IGNORE_INDEX).all()
    for word, labels in zip(batch.inputs[:, 1:].tolist(), batch.targets[:, 1:].tolist(), strict=True):
        state = list(range(len(group.elements[0])))  # what stands where
        for element, label in zip(word, labels, strict=True):
            move = group.elements[element]
            state = [move[point] for point in state]
            assert group.elements[label] == tuple(state)
    assert batch.documents is None


def test_words_follow_from_seed_step_and_row() -> None:
    group = Group.named("A5")
    loader = StateLoader(group, context=8, batch=12, seed=1)
    whole = loader.batch(step=5)
    for cuts in ([0, 12], [0, 4, 8, 12], [0, 1, 11, 12]):
        parts = [loader.batch(5, range(start, stop)) for start, stop in pairwise(cuts)]
        assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
        assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)
    others = [loader.batch(6), StateLoader(group, 8, 12, seed=2).batch(5), StateWindows(group, 8, 12).batch(0, 12)]
    seen = [whole.inputs, *(batch.inputs for batch in others)]
    assert len({tuple(row) for rows in seen for row in rows.tolist()}) == 4 * 12
    longer = StateLoader(group, context=16, batch=12, seed=1).batch(5)
    assert torch.equal(longer.inputs[:, :8], whole.inputs)


def test_streams_have_words_of_their_own_and_windows_are_fixed() -> None:
    group = Group.named("S5")
    words = [group.words(0, stream, range(50), 6) for stream in (TRAIN, VALIDATION, TEST)]
    assert len({tuple(word) for drawn in words for word in drawn.tolist()}) == 150
    windows = StateWindows(group, 7, 50, stream=TEST)
    assert len(windows) == 50
    assert windows.batch(0, 20).inputs[:, 1:].tolist() == words[2][:20].tolist()
    assert windows.batch(40, 60).inputs[:, 1:].tolist() == words[2][40:].tolist()
    assert len(windows.batch(60, 80)) == 0


def test_elements_are_drawn_evenly_and_apart(group: Group) -> None:
    words = group.words(seed=7, stream=TRAIN, numbers=range(3000), length=8)
    expected = words.size / len(group)
    assert abs(np.bincount(words.ravel(), minlength=len(group)) - expected).max() < 5 * expected**0.5
    first, second = words.reshape(-1, 2).T
    pairs = np.bincount(first * len(group) + second, minlength=len(group) ** 2)
    spread = ((pairs - pairs.mean()) ** 2 / pairs.mean()).sum() / len(pairs)  # χ² per cell
    assert abs(spread - 1) < 4 * (2 / len(pairs)) ** 0.5


def test_the_tokenizer_names_elements() -> None:
    group = Group.named("A5")
    tokenizer = group.tokenizer
    assert tokenizer.decode(range(len(group))) == " ".join(group.names)
    names = ["(12)(34)", "()", "(345)"]
    assert tokenizer.encode("  ".join(names)) == [group.names.index(name) for name in names]
    assert (tokenizer.eot, tokenizer.vocab_size, group.vocab_size) == (60, 61, 61)
    with pytest.raises(LoopformerError, match="words such as "):
        tokenizer.encode("(12) hello")


def test_groups_differ_in_the_hash_of_their_data() -> None:
    assert len({Group.named(name).index_hash for name in GROUPS}) == len(GROUPS)
    assert Group.named("S3").index_hash.startswith("63dc4241")  # checkpoints hold it: it must stay


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"states": "S4"}, "data.states must be one of S3, A5, S5 or null, got 'S4'"),
        ({"states": "S3", "documents": True}, "data.documents applies to text"),
        ({"states": "S3", "prepare": "stdlib"}, "data.prepare applies to text"),
        ({"states": "S3", "train_tokenizer": 512}, "data.train_tokenizer applies to text"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(LoopformerError, match=sentence):
        DataConfig(**settings)  # type: ignore[arg-type]


def test_wrong_names_and_counts() -> None:
    with pytest.raises(LoopformerError, match="There is no group 'Z6'; choose S3, A5 or S5"):
        Group.named("Z6")
    with pytest.raises(LoopformerError, match="1 word or more, got 0"):
        StateWindows(Group.named("S3"), 4, 0)
    with pytest.raises(LoopformerError, match=r"a model\.context of 2 or more, got 1"):
        StateLoader(Group.named("S3"), 1, 4)
    assert open_data(DataConfig(states="A5")) == Group.named("A5")
