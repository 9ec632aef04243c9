"""Files of prompts: answers in order and as alone, whatever a line holds, and the same bytes after a stop."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from loopformer import LM
from loopformer.errors import MAX_CHARS, FileProblem, LoopformerError, RunFailed
from loopformer.files import open_exclusive
from loopformer.inference import batch_file
from loopformer.inference.batch_file import BatchReport, answer_file
from loopformer.inference.engine import Engine
from loopformer.inference.request import Request

SETTINGS: dict[str, Any] = {"weights": "w", "temperature": 0.0, "stops": ("a",)}
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "every pass", "max_tokens": 12, "id": "first"},  # ends after those that come later
    {"prompt": "its time", "budget": 2, "max_tokens": 2},
    {"prompt": "naïve", "trajectory": "2-1-1", "temperature": 0.9, "top_p": 0.9, "seed": 3, "id": {"any": ["id"]}},
    {"prompt": "told", "budget": 9},
    {"prompt": "and its step", "max_tokens": 5, "budget": None},
    {"prompt": "日本語 ☕", "temperature": 1.5, "seed": 2**70, "top_k": 10**30, "max_tokens": 6, "id": "日本"},
    {"prompt": "is", "max_tokens": 1},
]


def lines(prompts: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(prompt).encode() + b"\n" for prompt in prompts)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "prompts.jsonl").write_bytes(lines(PROMPTS))
    return tmp_path / "prompts.jsonl"


def run(
    lm: LM, source: Path, out: Path, settings: dict[str, Any] = SETTINGS, engine: Engine | None = None
) -> BatchReport:
    def request_of(fields: dict[str, Any]) -> Request:
        options = {"max_tokens": 4, **fields}
        if "stop" in options:
            options["stops"] = options.pop("stop")
        return lm.requests([options.pop("prompt")], **options)[0]

    return answer_file(source, out, engine or lm.engine(rows=3, queue=2), request_of, settings)


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_a_far_too_long_prompt_is_refused_without_encoding_it(
    lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lm.tokenizer is not None
    encoded = list[int]()
    encode_batch = lm.tokenizer.encode_batch

    def watched(texts: Sequence[str]) -> list[list[int]]:
        encoded.extend(map(len, texts))
        return encode_batch(texts)

    monkeypatch.setattr(lm.tokenizer, "encode_batch", watched)
    (tmp_path / "prompts.jsonl").write_bytes(lines([{"prompt": "every pass " * 100_000}, {"prompt": "told"}]))
    assert run(lm, tmp_path / "prompts.jsonl", tmp_path / "out") == BatchReport(2, errors=1)
    first, second = read(tmp_path / "out")
    assert re.fullmatch(r"A text has at least \d+ tokens but the context is 64; shorten it\.", first["error"])
    assert second["new_tokens"] == 4
    for refuse in (lm.generate, lambda text: lm.score([text])):
        with pytest.raises(LoopformerError, match=r"at least \d+ tokens but the context is 64"):
            refuse("every pass " * 100_000)
    assert max(encoded) < 100


def test_answers_are_in_order_and_as_alone(lm: LM, source: Path, tmp_path: Path) -> None:
    done = run(lm, source, tmp_path / "out")
    assert done == BatchReport(len(PROMPTS), errors=1)
    answers = read(tmp_path / "out")
    assert [answer["id"] for answer in answers] == ["first", 2, {"any": ["id"]}, 4, 5, "日本", 7]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        options = {
            "max_tokens": 4,
            **{name: value for name, value in prompt.items() if name not in ("id", "prompt")},
        }
        if "error" in answer:
            assert set(answer) == {"id", "error"}
            assert "Budget 9 is above the model's 4 loops" in answer["error"]
            continue
        alone = lm.generate(prompt["prompt"], **options)
        assert answer == {
            "id": answer["id"],
            "text": alone.text,
            "reason": alone.reason,
            "trajectory": str(alone.trajectory),
            "prompt_tokens": alone.prompt_tokens,
            "new_tokens": len(alone.ids),
        }


def test_cut_off_anywhere_it_comes_to_the_same_bytes(lm: LM, source: Path, tmp_path: Path) -> None:
    done, out = run(lm, source, tmp_path / "out"), tmp_path / "out"
    whole, beside = out.read_bytes(), (tmp_path / "out.run.json").read_bytes()
    assert json.loads(beside)["version"] == 1
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    for cut in sorted({0, 1, *ends, *(end - 1 for end in ends), *(end + 9 for end in ends[:-1])}):
        out.write_bytes(whole[:cut])
        assert run(lm, source, out) == done
        assert out.read_bytes() == whole
    assert (tmp_path / "out.run.json").read_bytes() == beside
    out.unlink()  # to begin again, also otherwise
    run(lm, source, out, {**SETTINGS, "temperature": 1.0})


def test_what_stands_is_not_made_again_and_more_prompts_are_added(lm: LM, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(lm, source, out)
    before = out.read_bytes()
    engine = lm.engine(rows=3, queue=2)
    run(lm, source, out, engine=engine)
    assert engine.counts.new_tokens == 0
    source.write_bytes(lines(PROMPTS) + b'\n{"prompt": "a", "max_tokens": 2}')  # a blank line counts as a line
    assert run(lm, source, out).lines == len(PROMPTS) + 1
    assert out.read_bytes().startswith(before)
    assert read(out)[-1]["id"] == len(PROMPTS) + 2


def test_a_line_that_failed_is_answered_once_it_is_mended(lm: LM, source: Path, tmp_path: Path) -> None:
    out, mended = tmp_path / "out", [dict(prompt) for prompt in PROMPTS]
    mended[3]["budget"] = 3
    (tmp_path / "mended").write_bytes(lines(mended))
    run(lm, tmp_path / "mended", tmp_path / "right")
    wrong = lines(PROMPTS).replace(
        b'"its time"', b"its time"
    )  # no JSON, so its id is its number until it is mended
    wrong = wrong.replace(b'"is", "max_tokens": 1', b'"is", "max_token": 1')
    source.write_bytes(wrong)
    assert run(lm, source, out).errors == 3
    before = out.read_bytes()
    assert run(lm, source, out).errors == 3
    assert out.read_bytes() == before, "a line that was not changed keeps its error"

    source.write_bytes(wrong.replace(b"its time", b'"its time"').replace(b'"budget": 9', b'"budget": 8'))
    engine = lm.engine(rows=3, queue=2)
    assert run(lm, source, out, engine=engine).errors == 2
    assert engine.counts.new_tokens == 2, "only the mended line is generated"
    assert "Budget 8 is above" in read(out)[3]["error"]
    kept = read(out)
    source.write_bytes(lines(mended).replace(b'"every pass"', b'"each pass"'))
    with pytest.raises(FileProblem, match="holds answers to other prompts"):
        run(lm, source, out)
    assert read(out) == kept, "a line that was answered must not change"

    source.write_bytes(lines(mended) + b'{"prompt": "a", "max_tokens": 2}\n')  # mended and longer
    assert run(lm, source, out) == BatchReport(len(PROMPTS) + 1, errors=0)
    assert read(out)[:-1] == read(tmp_path / "right")


def test_a_mended_line_is_answered_after_any_interruption(
    lm: LM, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, record = tmp_path / "out", tmp_path / "out.run.json"
    run(lm, source, out)
    before, recorded = out.read_bytes(), record.read_bytes()
    mended = source.read_bytes().replace(b'"budget": 9', b'"budget": 3')
    source.write_bytes(mended)

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(batch_file, "_to_line", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(lm, source, out)
    assert out.read_bytes() == before, "the old answers stay until the new ones are written"
    assert run(lm, source, out).errors == 0
    whole = out.read_bytes()
    record.write_bytes(recorded)  # as if the process had been killed before it recorded what it had done
    assert run(lm, source, out).errors == 0
    assert out.read_bytes() == whole
    out.write_bytes(before[:-9])  # cut off after the failed line was answered
    record.write_bytes(recorded)
    assert run(lm, source, out).errors == 0
    assert out.read_bytes() == whole
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"not JSON", "The line is not JSON; write an object"),
        (b'{"prompt": "caf\xe9"}', "The line is not JSON; write an object"),
        (b"[" * 100_000, "The line is not JSON; write an object"),
        (b'["prompt"]', "The line must be an object such as"),
        (b"{}", "The line has no prompt; add one."),
        (b'{"prompt": null}', "The line has no prompt; add one."),
        (b'{"prompt": ""}', "The prompt is empty"),
        (b'{"prompt": 5}', "prompt must be text, got 5."),
        (b'{"prompt": "\\ud800"}', "that UTF-8 cannot encode"),
        (b'{"promt": "a"}', "Unknown field promt; did you mean prompt?"),
        (b'{"prompt": "a", "budget": [2]}', "budget must be a whole number, got [2]."),
        (b'{"prompt": "a", "budget": true}', "budget must be a whole number, got True."),
        (b'{"prompt": "a", "budget": 0}', "1 or more"),
        (b'{"prompt": "a", "budget": 1, "trajectory": "2-1"}', "not both"),
        (b'{"prompt": "a", "trajectory": "4-x"}', "4-x"),
        (b'{"prompt": "a", "stop": 5}', "stop must be text or a list of texts, got 5."),
        pytest.param(
            b'{"prompt": "a", "stop": "' + b"a" * 60_000 + b'"}',
            "A stop string may have 4096 characters, got 60000.",
            id="a long stop string",
        ),
        (b'{"prompt": "a", "max_tokens": 0}', "max_tokens must be 1 or more"),
        (b'{"prompt": "a", "top_p": "1"}', "top_p must be a number, got '1'."),
        (b'{"prompt": "a", "temperature": NaN}', "The line is not JSON; write an object"),
        (b'{"prompt": "a", "id": {"deep": [-Infinity]}}', "The line is not JSON; write an object"),
        (b'{"prompt": "a", "id": 1e999}', "The line is not JSON; write an object"),
        (b'{"prompt": "a", "certainty": 0.5}', "certainty was removed from generation"),
        (b'{"prompt": "a", "draft": 2}', "draft was removed"),
        (b'{"prompt": "a", "top_p": 1' + b"0" * 400 + b"}", "top_p must be a finite number"),
        (b'{"prompt": ["' + b"a" * 10_000 + b'"]}', f"prompt must be text, got ['{'a' * 77}"),
        (b'{"' + b"a" * 10_000 + b'": 1}', f"Unknown field {'a' * 79}"),
        (b'{"prompt": "a", "budget": 1' + b"0" * 4000 + b"}", f"Budget 1{'0' * 78}"),
        (b'{"prompt": "a", "top_k": -1' + b"0" * 4000 + b"}", f"top_k must be 1 or more, got -1{'0' * 77}"),
        (b'{"prompt": "' + b"a b" * 99 + b'"}', "but the context is 64; shorten it."),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, bytes) else "",
)
def test_a_line_that_cannot_be_run_says_why_and_ends_nothing(
    lm: LM, tmp_path: Path, line: bytes, said: str
) -> None:
    (tmp_path / "in").write_bytes(b'{"prompt": "its"}\n' + line + b'\r\n{"prompt": "step", "id": "\\udfff"}')
    assert run(lm, tmp_path / "in", tmp_path / "out") == BatchReport(3, 1)
    answers = read(tmp_path / "out")
    assert said in answers[1]["error"]
    assert len(answers[1]["error"]) <= MAX_CHARS + 1
    assert [answer["id"] for answer in answers] == [1, 2, "\udfff"]
    assert "text" in answers[2]
    assert run(lm, tmp_path / "in", tmp_path / "out") == BatchReport(3, 1), "and it can be continued"


def test_answers_to_something_else_are_refused_and_left_alone(lm: LM, source: Path, tmp_path: Path) -> None:
    out, beside = tmp_path / "out", tmp_path / "out.run.json"
    run(lm, source, out)
    whole, noted, given = out.read_bytes(), beside.read_bytes(), source.read_bytes()

    def refused(said: str, settings: dict[str, Any] = SETTINGS) -> None:
        left = out.read_bytes()
        with pytest.raises(FileProblem, match=f"{said}.* give another --out, or remove .*out to start over"):
            run(lm, source, out, settings)
        assert out.read_bytes() == left
        out.write_bytes(whole)
        beside.write_bytes(noted)
        source.write_bytes(given)

    refused("was begun with another model", {**SETTINGS, "weights": "other"})
    refused(r"was begun with other options \(temperature\)", {**SETTINGS, "temperature": 1.0})
    refused(r"was begun with other options \(stops\)", {**SETTINGS, "stops": ()})
    source.write_bytes(given.replace(b"every pass", b"each pass"))
    refused("holds answers to other prompts")
    source.write_bytes(lines(PROMPTS[:-1]))
    refused("holds answers to other prompts")
    out.write_bytes(whole.replace(b'"first"', b'"other"'))
    refused("Line 1 of .* does not answer its prompt")
    out.write_bytes(whole + b"{}\n")
    refused("Line 8 of .* does not answer its prompt")
    beside.write_text('{"version": 0}')
    refused("was begun by another version")
    record = json.loads(noted)
    damages: list[dict[str, Any]] = [
        {"input": None},
        {"input": {}},
        {"input": {**record["input"], "lines": "many"}},
        {"input": {**record["input"], "failed": None}},
        {"settings": None},
        {"settings": 3},
    ]
    for damage in damages:
        beside.write_text(json.dumps(record | damage))
        refused(r"out\.run\.json is damaged")
    beside.unlink()
    refused("so it may not hold answers")
    assert run(lm, source, out).lines == len(PROMPTS)


def test_files_that_cannot_be_read_or_shared(lm: LM, source: Path, tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="nothing cannot be read: No such file"):
        run(lm, tmp_path / "nothing", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with open_exclusive(tmp_path / "out"), pytest.raises(FileProblem, match="Another process is working on"):
        run(lm, source, tmp_path / "out")


def test_prompts_are_read_as_they_are_needed(lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the file, and however long its first answer takes."""
    monkeypatch.setattr(batch_file, "MAX_PENDING", 10)
    taken = 0

    def prompts() -> Iterator[Any]:
        nonlocal taken
        for number in range(100):
            taken += 1
            yield batch_file._Prompt(number, {"prompt": "a", "max_tokens": 1 if number else 40})

    engine = lm.engine(rows=2, queue=3)
    answers = batch_file._answer_in_order(
        engine, lambda fields: lm.requests([fields["prompt"]], max_tokens=fields["max_tokens"])[0], prompts()
    )
    assert next(answers)["id"] == 0
    assert taken == 10, "no more than may be done before the first"
    assert [answer["id"] for answer in answers] == list(range(1, 100))


def test_a_step_that_fails_is_taken_again(
    lm: LM, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(lm, source, tmp_path / "right")
    engine = lm.engine(rows=3, queue=2)
    decode, calls, failing = engine.runner.decode, 0, {2, 4}

    def fail(rows: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in failing:
            raise RuntimeError("out of\n memory")
        return decode(rows)

    monkeypatch.setattr(engine.runner, "decode", fail)
    run(lm, source, tmp_path / "out", engine=engine)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "right").read_bytes()

    (tmp_path / "out").unlink()
    failing |= set(range(calls + 3, calls + 99))
    with pytest.raises(RunFailed, match=r"failed twice in a row \(out of memory\); finished answers are kept"):
        run(lm, source, tmp_path / "out", engine=engine)
    kept = (tmp_path / "out").read_bytes()
    assert (tmp_path / "right").read_bytes().startswith(kept)
    run(lm, source, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "right").read_bytes()


def test_a_prompt_that_fails_alone_is_answered_by_its_error(
    lm: LM, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = lm.engine(rows=3, queue=2)
    start_prefill = engine.runner.start_prefill

    def fail(rows: Any) -> None:
        if any(row.request.max_tokens in (1, 12) for row in rows):
            raise RuntimeError("no luck")
        start_prefill(rows)

    monkeypatch.setattr(engine.runner, "start_prefill", fail)
    assert run(lm, source, tmp_path / "out", engine=engine).errors == 3
    answers = read(tmp_path / "out")
    assert [answers[0], answers[-1]] == [{"id": "first", "error": "no luck"}, {"id": 7, "error": "no luck"}]


def test_prompts_that_cannot_be_read_twice_are_refused(lm: LM, source: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileProblem, match="cannot be read twice"):
        run(lm, tmp_path / "pipe", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "begun").touch()
    with pytest.raises(FileProblem, match=r"prompst\.jsonl cannot be read"):
        run(lm, tmp_path / "prompst.jsonl", tmp_path / "begun")
    before = source.read_bytes()
    with pytest.raises(FileProblem, match="the file of prompts itself; give another --out"):
        run(lm, source, source)
    assert source.read_bytes() == before


def test_prompts_that_are_gone_meanwhile_are_missed(
    lm: LM, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = batch_file._read_prompts
    monkeypatch.setattr(batch_file, "_read_prompts", lambda lines: islice(prompts(lines), 3))
    with pytest.raises(FileProblem, match="3 of its 7 prompts are answered"):
        run(lm, source, tmp_path / "out")
    assert len(read(tmp_path / "out")) == 3
