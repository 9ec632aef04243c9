"""`loopformer generate`: its options are obeyed, or refused in one clear sentence."""

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from loopformer import LoopformerError
from loopformer.cli import app
from loopformer.evaluation.store import weights_hash
from loopformer.lm import LM, load

from .models import save_small
from .process import press_control_c


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_small(tmp_path_factory.mktemp("model") / "m", context=32)


def ask(model: str, *words: str) -> Result:
    """Greedy, unless `words` say otherwise."""
    asked = ["generate", "every pass", "--model", model, "--device", "cpu", "--max-tokens", "4"]
    asked += ["--temperature", "0", *words]
    return CliRunner().invoke(app, asked)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--fast"], "fast needs a CUDA device and Triton; leave it out."),
        (["--certainty", "0.5"], "--certainty was removed from generation"),
        (["--int8"], "--int8 was removed"),
        (["--adaptive"], "--adaptive was removed, as it never beat a fixed budget; use --budget."),
        (["--draft-length", "3"], "--draft-length was removed"),
        (["--draft", "1"], "--draft was removed, as it made generation no faster; leave it out"),
        (["--fast", "--max-ms-per-token", "5"], "--fast and --max-ms-per-token exclude each other"),
        (["--dtype", "float33"], "There is no dtype 'float33'; did you mean float32?"),
    ],
)
def test_mistakes_are_one_clear_sentence(model: str, words: list[str], said: str) -> None:
    found = ask(model, *words)
    assert isinstance(found.exception, LoopformerError)
    assert said in str(found.exception)


def test_the_dtype_is_what_is_asked_for(model: str) -> None:
    texts = [json.loads(ask(model, "--json", *words).stdout) for words in ([], ["--dtype", "float32"])]
    assert texts[0]["logprobs"] == texts[1]["logprobs"]
    rounded = json.loads(ask(model, "--json", "--dtype", "bfloat16").stdout)
    assert rounded["logprobs"] != texts[0]["logprobs"]
    assert rounded["logprobs"][0] == pytest.approx(texts[0]["logprobs"][0], abs=0.1)


def test_what_was_found_for_the_weights_holds_in_any_dtype(model: str) -> None:
    entry = {"trajectory": "3-1", "weights": weights_hash(load(model).model)}
    (Path(model) / "schedules.json").write_text(json.dumps({"2": entry}))
    for dtype in ("float32", "bfloat16"):
        found = ask(model, "--budget", "2", "--schedule", "best", "--dtype", dtype, "--json")
        assert json.loads(found.stdout)["trajectory"] == "3-1"


def test_generate_streams_text_and_prints_json(model: str) -> None:
    on = ["--model", model, "--device", "cpu", "--max-tokens", "4"]
    found = json.loads(ask(model, "--trajectory", "2-1-1", "--json").stdout)
    assert (found["trajectory"], found["new_tokens"]) == ("2-1-1", 4)
    shown = ask(model, "--trajectory", "2-1-1")
    assert shown.stdout == found["text"] + "\n"
    assert ask(model, "--budget", "2").stdout.endswith("\n")
    rows = json.loads(ask(model, "--compare", "1,2-1-1,4", "--json").stdout)
    assert [(row["budget"], row["trajectory"]) for row in rows] == [(1, "1"), (3, "2-1-1"), (4, "4")]
    assert rows[1]["text"] == found["text"]
    piped = subprocess.run(
        [sys.executable, "-m", "loopformer", "generate", *on, "--max-flops", "1e12"],
        input="every pass\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert "budget 4 of 4" in piped.stderr
    named = CliRunner().invoke(
        app, ["generate", "--prompt", "every pass", *on, "--trajectory", "2-1-1", "--temperature", "0"]
    )
    assert named.stdout == shown.stdout
    mistakes: list[tuple[list[str], bytes, str]] = [
        (["a", "--prompt", "b"], b"", "the argument PROMPT and --prompt exclude each other"),
        (["a", "--budget", "1", "--compare", "1,2"], b"", "--budget and --compare exclude each other"),
        (["a", "--compare", "1,2", "--schedule", "best"], b"", "--schedule goes with --budget"),
        ([], b"caf\xe9", "not UTF-8"),
        (["caf\udce9"], b"", "UTF-8 cannot encode"),
        ([], b"\n", "prompt is empty"),
    ]
    for words, given, said in mistakes:
        error = CliRunner().invoke(app, ["generate", *words, *on], input=given).exception
        assert isinstance(error, LoopformerError)
        assert said in str(error)


def test_a_prompt_is_sampled_and_the_printed_seed_repeats_its_text(model: str) -> None:
    sampling = ["--temperature", "0.8", "--top-p", "0.95"]
    words = ["generate", "every pass", "--model", model, "--device", "cpu", "--max-tokens", "12"]
    runner = CliRunner()
    found = json.loads(runner.invoke(app, [*words, "--json"]).stdout)
    again = runner.invoke(app, [*words, *sampling, "--seed", str(found["seed"])])
    assert again.stdout == found["text"] + "\n"
    assert f"; seed {found['seed']}; " in again.stderr
    seeds = {json.loads(runner.invoke(app, [*words, "--json"]).stdout)["seed"] for _ in range(3)}
    assert len(seeds) > 1
    expected = load(model).generate("every pass", max_tokens=12, temperature=0.8, top_p=0.95, seed=found["seed"])
    assert found["text"] == expected.text

    greedy = runner.invoke(app, [*words, "--temperature", "0"])
    assert "seed" not in greedy.stderr
    assert greedy.stdout == load(model).generate("every pass", max_tokens=12).text + "\n"


def test_compared_budgets_draw_with_the_same_seed(model: str) -> None:
    words = ["generate", "every pass", "--model", model, "--device", "cpu", "--max-tokens", "8"]
    runner = CliRunner()
    rows = json.loads(runner.invoke(app, [*words, "--compare", "1,2,4,4", "--json"]).stdout)
    assert len({row["seed"] for row in rows}) == 1
    assert rows[2]["text"] == rows[3]["text"]
    seed = str(rows[0]["seed"])
    for row in rows:
        alone = runner.invoke(app, [*words, "--budget", str(row["budget"]), "--seed", seed, "--json"])
        assert json.loads(alone.stdout)["text"] == row["text"]
    assert f"[seed {seed} for each]" in runner.invoke(app, [*words, "--compare", "1,2", "--seed", seed]).stderr


def test_a_comparison_warms_up_before_its_first_row(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generated: list[tuple[str, int]] = []

    def generate(self: LM, text: str, **options: Any) -> Any:
        generated.append((str(options["trajectory"]), options["max_tokens"]))
        return original(self, text, **options)

    original = LM.generate
    monkeypatch.setattr(LM, "generate", generate)
    words = ["generate", "every pass", "--model", model, "--device", "cpu", "--max-tokens", "8", "--compare", "2,4"]
    assert len(json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)) == 2
    assert generated == [("2", 2), ("2", 8), ("4", 8)]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Enough to be in the middle of."""
    given = [{"prompt": f"every pass {number}", "max_tokens": 6 + number % 9} for number in range(80)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in given))
    return tmp_path / "prompts.jsonl"


def file_words(model: str, source: Path, out: Path) -> list[str]:
    return ["generate", "-m", model, "--input", str(source), "--out", str(out), "--device", "cpu", "--rows", "4"]


def answer(model: str, source: Path, out: Path, *words: str) -> list[dict[str, Any]]:
    found = CliRunner().invoke(app, [*file_words(model, source, out), *words])
    if isinstance(found.exception, LoopformerError):
        raise found.exception
    assert found.exit_code == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_what_a_line_does_not_say_the_options_say(model: str, tmp_path: Path) -> None:
    given: list[dict[str, Any]] = [
        {"prompt": "every"},
        {"prompt": "every", "trajectory": "2-1-1", "id": "own"},
        {"prompt": "every", "budget": 1, "max_tokens": 5, "temperature": 0, "stop": "e"},
        {"prompt": "every", "seed": 4, "stop": []},
    ]
    source, out = tmp_path / "in", tmp_path / "deep" / "out"
    source.write_text("\n".join(map(json.dumps, given)))
    shared: dict[str, Any] = {"temperature": 0.8, "seed": 1, "max_tokens": 3, "top_k": 20}
    options = [word for name, value in shared.items() for word in ("--" + name.replace("_", "-"), str(value))]
    answers = answer(model, source, out, "--budget", "2", "--stop", " ", *options)
    for line, found in zip(given, answers, strict=True):
        depth = {} if {"budget", "trajectory"} & set(line) else {"budget": 2}
        own = {name: value for name, value in line.items() if name not in ("id", "prompt", "stop")}
        alone = load(model).generate("every", **{**shared, **depth, **own, "stops": line.get("stop", " ")})
        assert found["text"] == alone.text
        assert found["trajectory"] == str(alone.trajectory)
    assert [found["id"] for found in answers] == [1, "own", 3, 4]
    with pytest.raises(LoopformerError, match=r"was begun with other options \(seed\)"):
        answer(model, source, out, "--budget", "2", "--stop", " ", *options, "--seed", "2")
    assert answer(model, source, out, "--trajectory", "2", "--stop", " ", *options, "--rows", "1") == answers


def test_lines_of_a_file_are_greedy(model: str, tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_text('{"prompt": "every"}\n')
    (found,) = answer(model, source, out, "--max-tokens", "12")
    assert found["text"] == load(model).generate("every", max_tokens=12).text


def test_a_bad_line_is_an_exit_code_at_the_end(
    model: str, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_text('{"prompt": "every"}\nnothing\n{"prompt": "pass"}\n')
    for _ in range(2):  # also where all was done before
        code, said, error = command(*file_words(model, source, out))
        assert (code, said.split()) == (1, ["written:", str(out)])
        assert error.startswith(f"loopformer: 1 of 3 lines failed; see `error` in {out}, correct these lines in")
    assert ["error" in json.loads(line) for line in out.read_text().splitlines()] == [False, True, False]
    source.write_text(source.read_text().replace("nothing", '{"prompt": "its", "id": "mended"}'))
    assert command(*file_words(model, source, out))[0] == 0
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == [1, "mended", 3]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["every"], "--input and a prompt exclude each other; give only one of them."),
        (["--compare", "1,2"], "--input and --compare exclude each other"),
        (["--schedule", "best", "--budget", "2"], "--input and --schedule exclude each other"),
        (["--json"], "--input and --json exclude each other"),
        (["--rows", "0"], "An engine needs 1 row or more, got 0."),
        (["--budget", "9"], "Budget 9 is above the model's 4 loops"),
        (["--max-tokens", "0"], "max_tokens must be 1 or more"),
        (["--fast"], "fast needs a CUDA device and Triton"),
    ],
)
def test_what_is_wrong_for_all_lines_is_said_before_the_first(
    model: str, prompts: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    with pytest.raises(LoopformerError, match=said):
        answer(model, prompts, tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()


def test_input_and_out_go_together(model: str, prompts: Path) -> None:
    for words, said in [
        (["--input", str(prompts)], "--input and --out go together: prompts, and their answers."),
        (["every", "--out", "x"], "--input and --out go together: prompts, and their answers."),
        (["every", "--rows", "2"], "--rows is for a file of prompts; add --input."),
    ]:
        error = CliRunner().invoke(app, ["generate", "-m", model, *words]).exception
        assert isinstance(error, LoopformerError)
        assert str(error) == said


def test_control_c_keeps_what_is_answered_and_the_rest_comes_to_the_same_bytes(
    model: str, prompts: Path, tmp_path: Path
) -> None:
    answer(model, prompts, tmp_path / "whole")
    out = tmp_path / "out"
    *progress, last = press_control_c(
        "loopformer.inference.batch_file.append_line", 11, *file_words(model, prompts, out)
    ).splitlines()
    assert last == "loopformer: stopped; answered lines are kept, the same command continues after them."
    assert all(line.startswith("prompts.jsonl: ") for line in progress)  # every few seconds on a slow machine
    assert out.read_bytes().splitlines() == (tmp_path / "whole").read_bytes().splitlines()[:10]
    answer(model, prompts, out)
    assert out.read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_full_disk_is_one_sentence_and_harms_nothing(model: str, prompts: Path, tmp_path: Path) -> None:
    """A limit on file size stands in for a full disk: the kernel refuses the write in the same way."""
    answer(model, prompts, tmp_path / "whole")
    whole, out = (tmp_path / "whole").read_bytes(), tmp_path / "out"
    process = subprocess.run(
        [sys.executable, "-m", "loopformer", *file_words(model, prompts, out)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1
    assert f"loopformer: Cannot write {out}: " in process.stderr  # after the progress, if it took long
    assert process.stderr.endswith("make room and start again.\n")
    assert process.stderr.count("loopformer: ") == 1
    kept = out.read_bytes()
    assert whole.startswith(kept)
    assert kept.endswith(b"\n"), "no half line is left"
    answer(model, prompts, out)
    assert out.read_bytes() == whole


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_fast_on_a_gpu_reads_bfloat16(model: str) -> None:
    pytest.importorskip("triton")
    fast = ["--device", "cuda", "--fast", "--json"]
    found = [json.loads(ask(model, *fast, *words).stdout) for words in ([], ["--dtype", "bfloat16"])]
    assert found[0]["logprobs"] == found[1]["logprobs"]
    assert "including the prompt and compilation" in ask(model, "--device", "cuda", "--fast").stderr
