"""Stories among text: which rows are stories, what they hold, and that nothing depends on how a batch is cut."""

from pathlib import Path

import pytest
import torch

from loopformer.config import RunConfig, load_run
from loopformer.data.generated import open_data
from loopformer.data.loader import IGNORE_INDEX, Loader
from loopformer.data.mixture import MixedLoader, StoriesAmongText
from loopformer.data.prepare import prepare
from loopformer.data.shards import TokenData
from loopformer.data.states import TEST
from loopformer.data.stories import World
from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import LoopformerError

BATCH, CONTEXT = 8, 256


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text, in tokens that know the words of the stories."""
    folder, world = tmp_path_factory.mktemp("mixture"), World.open("cups")
    told = [world.text(story) for story in world.stories(0, TEST, range(200))]
    (folder / "text.txt").write_text("\n\n".join(["An ordinary text about cups and balls.", *told] * 3))
    prepare([str(folder / "text.txt")], folder / "data", train_tokenizer=400, val_fraction=0.1)
    return folder / "data"


def run_of(text: Path, *more: str) -> RunConfig:
    settings = [f"data.path={text}", "data.stories=cups", "data.story_rows=0.5", f"model.context={CONTEXT}"]
    return load_run("demo", [*settings, f"training.batch={BATCH}", "training.steps=100", *more])[0]


def loader_of(run: RunConfig) -> MixedLoader:
    data = open_data(run.data)
    assert isinstance(data, StoriesAmongText)
    loader = data.loader(run)
    assert isinstance(loader, MixedLoader)
    return loader


@pytest.mark.parametrize("loss", ["answers", "text"])
def test_rows_are_windows_or_whole_stories(text: Path, loss: str) -> None:
    run = run_of(text, f"data.loss={loss}")
    data, tokenizer = TokenData.open(str(text), "train"), Tokenizer.load(text)
    for step in (0, 50):
        batch, windows = loader_of(run).batch(step), Loader(data, CONTEXT, BATCH).batch(step)
        is_text = (batch.inputs == windows.inputs).all(1)
        assert is_text.sum() == BATCH / 2
        assert torch.equal(batch.targets[is_text], windows.targets[is_text])
        for inputs, targets in zip(batch.inputs[~is_text], batch.targets[~is_text], strict=True):
            told = tokenizer.decode(inputs.tolist(), special=True).split("<|endoftext|>")
            stories = [story for story in told if story]
            assert stories
            learned = targets != IGNORE_INDEX
            if loss == "text":
                assert torch.equal(targets[:-1][learned[:-1]], inputs[1:][learned[:-1]])
                continue
            answers = [story.split()[-1] for story in stories]
            assert tokenizer.decode(targets[learned].tolist(), special=True) == "".join(
                f" {answer}<|endoftext|>" for answer in answers
            )
            assert set(answers) <= {"left", "middle", "right"}


def test_rows_do_not_depend_on_how_a_batch_is_cut(text: Path) -> None:
    loader = loader_of(run_of(text))
    whole = loader.batch(7)
    for rows in ([0, 1, 2], [7, 3], [5]):
        part = loader.batch(7, rows)
        assert torch.equal(part.inputs, whole.inputs[rows])
        assert torch.equal(part.targets, whole.targets[rows])
    kinds = {tuple((loader.batch(step).targets[:, 0] == IGNORE_INDEX).tolist()) for step in range(8)}
    assert len(kinds) > 1  # not always the same rows are stories


def test_other_tokens_say_the_same(text: Path) -> None:
    world, tokenizer = World.open("cups"), Tokenizer.load(text)
    stories = world.stories(1, TEST, range(20))
    for story, own, encoded in zip(
        stories,
        world.encode(stories, world.tokenizer),
        world.encode(stories, tokenizer),
        strict=True,
    ):
        assert own == (story.ids, [story.answer])
        assert tokenizer.decode(encoded.ids) == world.text(story)
        answer = world.tokenizer.decode([story.answer])
        assert tokenizer.encode(f"{world.text(story)} {answer}") == [*encoded.ids, *encoded.answer]


def test_other_stories_or_another_text_are_other_data(text: Path) -> None:
    both = open_data(run_of(text).data)
    assert both.index_hash not in (World.open("cups").index_hash, TokenData.open(str(text), "train").index_hash)
    assert both.vocab_size == 400
    assert isinstance(
        open_data(run_of(text, "data.story_rows=1", "data.prepare=null", "data.train_tokenizer=null").data), World
    )


def test_worlds_take_turns(text: Path) -> None:
    tokenizer = Tokenizer.load(text)
    settings = ["data.stories=cups,village", "data.loss=text", "model.context=1024", "data.story_rows=0.8"]
    batch = loader_of(run_of(text, *settings)).batch(0)
    firsts = list[bool]()
    for row in batch.inputs:
        told = tokenizer.decode(row.tolist(), special=True).split("<|endoftext|>")
        if told[-1] == "":  # padding: a row of stories
            stories = [" cup" in story for story in told if story]
            firsts.append(stories[0])
    assert {True, False} == set(firsts)  # no world is always the one that is cut off
    again = loader_of(run_of(text, *settings, "data.workers=2")).batch(0)
    assert torch.equal(again.inputs, batch.inputs)
    with pytest.raises(LoopformerError, match="Several worlds need text beside them"):
        open_data(load_run("stories", ["data.stories=cups,village"])[0].data)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["model.context=40"], r"model\.context is 40, too short for the stories of cups; set it to \d+ or more\."),
        (
            ["data.story_rows=0.01"],
            r"0 of 8 rows would be stories; change data\.story_rows or raise training\.batch",
        ),
        (["data.story_rows=0.97"], r"8 of 8 rows would be stories"),
        (["data.stories=','"], r"data\.stories names no world"),
        (["data.stories=null"], r"data\.story_rows and data\.workers need data\.stories"),
    ],
)
def test_what_would_teach_nothing_is_refused(text: Path, settings: list[str], sentence: str) -> None:
    with pytest.raises(LoopformerError, match=sentence):
        loader_of(run_of(text, *settings))


def test_stories_of_many_hops_are_not_left_out(text: Path) -> None:
    tokenizer, loader = Tokenizer.load(text), loader_of(run_of(text, "data.loss=text", "data.curriculum=0"))
    longest = 0
    for step in range(6):
        batch = loader.batch(step)
        rows = [row for row in batch.inputs if (row == tokenizer.eot).any()]
        told = [
            story for row in rows for story in tokenizer.decode(row.tolist(), special=True).split("<|endoftext|>")
        ]
        longest = max(longest, *(len(story) for story in told))
    world = World.open("cups")
    assert longest >= min(len(world.text(story)) for story in world.stories(0, TEST, range(40), hops=6))


def test_documents_are_refused(text: Path) -> None:
    with pytest.raises(LoopformerError, match=r"data\.documents does not apply where data\.story_rows mixes"):
        run_of(text, "data.documents=true")
