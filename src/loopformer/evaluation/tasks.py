"""The paper's tasks as plain requests, and a model's answers to them. This needs no lm-evaluation-harness.

    requests = Requests(facts, {"copa": [Query("loglikelihood", ("The sky is", " blue"))]})
    answers = run_requests(loaded, requests, [trajectory])        # stored answers are reused
    answers.runs[str(trajectory)]["copa"].values                  # [[-1.25, True]]
    write_requests("requests.jsonl", requests)                    # to answer on a machine without the harness

Kinds of requests and their arguments are those of the harness:
    loglikelihood          (context, continuation) → [log-likelihood, whether greedy decoding gives that]
    loglikelihood_rolling  (text,)                 → log-likelihood of all tokens, each with as much context as fits

Local files of the paper's tasks are JSON lines named TASK.SPLIT.jsonl, with the fields in docs/tasks.md. Files
of requests and answers are JSON lines too. The first line says what the file is. Each other line is one request, or
the answers of one trajectory to one task. Log-likelihoods keep every digit.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import FileProblem, LoopformerError
from loopformer.evaluation.store import JsonDict, ReportProgress
from loopformer.files import write_atomic
from loopformer.scoring import BATCH_TOKENS, CountProgress, Span, loglikelihoods
from loopformer.trajectory import Trajectory

if TYPE_CHECKING:
    from loopformer.evaluation.loaded import LoadedModel
    from loopformer.lm import LM

REQUESTS_FORMAT, ANSWERS_FORMAT, FORMAT_VERSION = "loopformer-requests", "loopformer-answers", 1

SHARE_METRICS = ("acc", "exact_match")  # beginnings of metrics that are shares of correct answers
_LOGLIKELIHOOD, _ROLLING = "loglikelihood", "loglikelihood_rolling"


@dataclass(frozen=True)
class Task:
    """A task of the harness, its column in the paper's table, and the name of its local file."""

    score: str  # the key of its column
    label: str  # the title of its column
    metric: str  # what the paper reports
    folder: str  # holds its definition, relative to the harness's lm_eval/tasks
    split: str  # the split that the harness scores
    examples: int  # how many that split has
    file: str = ""  # how the local file's name begins, if not with the task's name


TASKS = {
    "copa": Task("copa", "COPA", "acc", "super_glue/copa", "validation", 100),
    "hellaswag": Task("hellaswag", "HellaSwag", "acc_norm", "hellaswag", "validation", 10_042),
    "lambada_openai": Task("lambada", "LAMBADA", "acc", "lambada", "test", 5_153),
    "openbookqa": Task("openbookqa", "OpenBookQA", "acc_norm", "openbookqa", "test", 500),
    "piqa": Task("piqa", "PIQA", "acc_norm", "piqa", "validation", 1_838),
    "race": Task("race", "RACE", "acc", "race", "test", 1_045, "race_high"),
    "social_iqa": Task("social_iqa", "Social IQa", "acc", "siqa", "validation", 1_954),
    "arc_easy": Task("arc", "ARC", "acc_norm", "arc", "test", 2_376),
    "arc_challenge": Task("arc", "ARC", "acc_norm", "arc", "test", 1_172),
    "sciq": Task("sciq", "SciQ", "acc_norm", "sciq", "test", 1_000),
    "winogrande": Task("winogrande", "WinoGrande", "acc", "winogrande", "validation", 1_267),
}
# The columns of the paper's table. A column's score is the mean over its tasks.
PAPER = {each.score: [name for name, task in TASKS.items() if task.score == each.score] for each in TASKS.values()}


def paper_scores(values: Mapping[str, float]) -> dict[str, float] | None:
    """The paper's ten scores and their average, from one value per task; None unless all eleven have one."""
    if not TASKS.keys() <= values.keys():
        return None
    scores = {score: sum(values[task] for task in tasks) / len(tasks) for score, tasks in PAPER.items()}
    return {**scores, "average": sum(scores.values()) / len(scores)}


# Local files of the paper's tasks.


@dataclass(frozen=True)
class LocalExamples:
    """The examples of a local file, with the fields that the harness's task definition expects."""

    file: str
    sha256: str
    examples: tuple[JsonDict, ...]
    cleaned: bool  # the examples already went through the harness's `process_docs`
    note: str | None  # how this differs from what the harness scores


def read_examples(folder: str | Path, name: str) -> LocalExamples:
    """Read a task's examples: the split that the harness scores, else a stand-in that `note` describes."""
    task, path = TASKS[name], _find_file(Path(folder), name)
    examples: list[JsonDict] = []
    content = path.read_bytes()
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            example = json.loads(line)
            problems = example.get("problems")
        except (ValueError, AttributeError, RecursionError) as error:
            message = f"Line {number} of {path} is no JSON object; it should be an example of {name}."
            raise FileProblem(message) from error
        if isinstance(problems, list):  # RACE: the harness expects the text of a Python list, as on the Hub
            example["problems"] = repr(problems)
        examples.append(example)
    if not examples:
        raise FileProblem(f"{path} is empty; it should hold the examples of {name}, one a line.")
    split = path.name.split(".")[-2].rstrip("0123456789")
    notes = [f"the {split} split instead of {task.split}"] if split != task.split else []
    count = len(examples)
    notes += [f"{count:,} examples instead of {task.examples:,}"] if count != task.examples else []
    note = f"{name} is a stand-in: {', '.join(notes)}." if notes else None
    cleaned = name == "hellaswag" and "query" in examples[0]
    return LocalExamples(path.name, hashlib.sha256(content).hexdigest(), tuple(examples), cleaned, note)


def _find_file(folder: Path, name: str) -> Path:
    """The file of the scored split, else of another split. A complete file is preferred to a partial one."""
    if not folder.is_dir():
        raise FileProblem(f"There is no folder {folder}; --data takes one with files like copa.validation.jsonl.")
    stem, scored_split = TASKS[name].file or name, TASKS[name].split
    for split in dict.fromkeys([scored_split, "test", "validation"]):
        for path in (folder / f"{stem}.{split}.jsonl", *sorted(folder.glob(f"{stem}.{split}[0-9]*.jsonl"))):
            if path.is_file():
                return path
    raise FileProblem(
        f"{folder} has no data for {name}; put {stem}.{scored_split}.jsonl there, or leave {name} out of --tasks."
    )


# Requests and answers.


@dataclass(frozen=True)
class Query:
    """One request of a task, with the kind and arguments that the harness gives it."""

    kind: str
    arguments: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.kind not in (_LOGLIKELIHOOD, _ROLLING):
            raise LoopformerError(
                f"Requests of the kind {self.kind!r} are not supported, only log-likelihoods are; for other tasks "
                "export the model with `loopformer export` and run `lm_eval --model hf` (docs/huggingface.md)."
            )

    @property
    def line(self) -> str:
        """The request as one line of JSON, always the same for the same request."""
        return json.dumps([self.kind, *self.arguments], ensure_ascii=False)


@dataclass
class TaskAnswers:
    """The answers of one trajectory to one task in the order of its requests, and what they cost."""

    values: list[Any]
    tokens: int  # run through the model, without padding
    cut: int  # requests that were too long for the context and lost their first tokens
    seconds: float


@dataclass(frozen=True)
class Requests:
    """All requests of some tasks. `facts` says which tasks and examples they are, and has a hash per task."""

    facts: Mapping[str, Any]
    queries: Mapping[str, list[Query]]  # by task


@dataclass(frozen=True)
class Answers:
    """The answers of one model to all requests, along each trajectory."""

    facts: Mapping[str, Any]  # of the requests
    model: Mapping[str, Any]
    runs: Mapping[str, Mapping[str, TaskAnswers]]  # by trajectory and task


def hash_requests(queries: Sequence[Query]) -> str:
    """One hash for a list of requests."""
    return hashlib.sha256("\n".join(query.line for query in queries).encode()).hexdigest()


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[Sequence[str]]) -> list[Span]:
    """Contexts and their continuations as tokens, split exactly as lm-evaluation-harness splits them.

    Spaces at the end of a context belong to the continuation. Context and continuation are tokenized together, and
    as many leading tokens as the context has on its own are the context. An empty context becomes the end token.
    """
    splits = [(context.rstrip(), context + continuation) for context, continuation in pairs]
    texts = list({text for split in splits for text in split})
    ids = dict(zip(texts, tokenizer.encode_batch(texts), strict=True))
    spans = []
    for (context, continuation), (stripped, joined) in zip(pairs, splits, strict=True):
        before, scored = ids[stripped], ids[joined][len(ids[stripped]) :]
        if not scored:
            raise LoopformerError(
                f"The continuation {continuation[:40]!r} adds no token to its context {context[-40:]!r}; "
                "the task cannot be scored with this tokenizer."
            )
        spans.append(Span((*(before or [tokenizer.eot]), *scored), len(scored)))
    return spans


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Span]:
    """Spans that score every token of each text. An end token precedes the first."""
    return [Span.text(ids, tokenizer.eot) for ids in tokenizer.encode_batch(texts)]


def answer_requests(
    lm: LM,
    queries: Sequence[Query],
    trajectories: Sequence[Trajectory],
    batch_tokens: int = BATCH_TOKENS,
    count: CountProgress | None = None,
) -> dict[Trajectory, TaskAnswers]:
    """The answers to requests along each trajectory. Each is charged an equal share of the time."""
    started, tokenizer = time.perf_counter(), lm.need_tokenizer()
    pairs = iter(encode_pairs(tokenizer, [query.arguments for query in queries if query.kind == _LOGLIKELIHOOD]))
    texts = iter(encode_texts(tokenizer, [query.arguments[0] for query in queries if query.kind == _ROLLING]))
    spans = [next(pairs if query.kind == _LOGLIKELIHOOD else texts) for query in queries]
    scores = loglikelihoods(lm.model, spans, trajectories, batch_tokens, count=count)
    seconds = (time.perf_counter() - started) / max(1, len(trajectories))
    # Rolling requests are scored in several windows and lose nothing. Only the context of a pair can be cut.
    sizes = [len(span.tokens) for span, query in zip(spans, queries, strict=True) if query.kind == _LOGLIKELIHOOD]
    cut = sum(size > lm.model.config.context + 1 for size in sizes)
    answers = dict[Trajectory, TaskAnswers]()
    for trajectory, scored in scores.items():
        answered = zip(queries, scored.answers, strict=True)
        values = [list(answer) if query.kind == _LOGLIKELIHOOD else answer[0] for query, answer in answered]
        answers[trajectory] = TaskAnswers(values, scored.tokens, cut, seconds)
    return answers


def run_requests(
    loaded: LoadedModel,
    requests: Requests,
    trajectories: Sequence[Trajectory],
    batch_tokens: int = BATCH_TOKENS,
    report: ReportProgress | None = None,
    together: bool = False,
) -> Answers:
    """The answers to the requests of each task along each trajectory.

    The answers of one trajectory to one task are stored as soon as they are complete, and come from the store the
    next time. `together` runs all trajectories at once, with their common first steps computed once. The time is
    then divided equally among them.
    """
    kind = "answers, time shared" if together else "answers"  # their seconds differ, so they are stored apart
    hashes = {task: hash_requests(queries) for task, queries in requests.queries.items()}
    runs: dict[str, dict[str, TaskAnswers]] = {str(trajectory): {} for trajectory in trajectories}
    for group in [list(trajectories)] if together else [[trajectory] for trajectory in trajectories]:
        for task, queries in requests.queries.items():
            shared_key = {"kind": kind, **loaded.identity, "task": task, "requests": hashes[task]}
            keys = {trajectory: {**shared_key, "trajectory": str(trajectory)} for trajectory in group}
            for trajectory, key in keys.items():
                if (stored := loaded.store.get(key)) is not None:
                    runs[str(trajectory)][task] = TaskAnswers(**stored)
            missing = [trajectory for trajectory in group if task not in runs[str(trajectory)]]
            if not missing:
                continue
            label = missing[0].label if len(missing) == 1 else f"{len(missing)} schedules"
            count = None if report is None else partial(report, f"{task} {label}")
            for trajectory, answered in answer_requests(loaded.lm, queries, missing, batch_tokens, count).items():
                loaded.store.put(keys[trajectory], asdict(answered))
                runs[str(trajectory)][task] = answered
    return Answers(requests.facts, loaded.describe(trajectories), runs)


# Files of requests and answers.


def write_requests(path: str | Path, requests: Requests) -> None:
    lines = (
        {"task": task, "kind": query.kind, "arguments": query.arguments}
        for task, queries in requests.queries.items()
        for query in queries
    )
    _write_lines(path, REQUESTS_FORMAT, {"facts": requests.facts}, lines)


def read_requests(path: str | Path) -> Requests:
    queries: dict[str, list[Query]] = {}
    with _read_lines(path, REQUESTS_FORMAT, "--export-requests") as (head, lines):
        for line in lines:
            queries.setdefault(line["task"], []).append(Query(line["kind"], tuple(line["arguments"])))
        for task, facts in head["facts"]["tasks"].items():
            if facts["requests_sha256"] != hash_requests(queries[task]):
                raise ValueError("requests are missing")
    return Requests(head["facts"], queries)


def write_answers(path: str | Path, answers: Answers) -> None:
    lines = (
        {"trajectory": trajectory, "task": task, **asdict(answered)}
        for trajectory, run in answers.runs.items()
        for task, answered in run.items()
    )
    _write_lines(path, ANSWERS_FORMAT, {"facts": answers.facts, "model": answers.model}, lines)


def read_answers(path: str | Path) -> Answers:
    runs: dict[str, dict[str, TaskAnswers]] = {}
    with _read_lines(path, ANSWERS_FORMAT, "--score-requests") as (head, lines):
        for line in lines:
            trajectory, task = line.pop("trajectory"), line.pop("task")
            runs.setdefault(trajectory, {})[task] = TaskAnswers(**line)
        facts, model = head["facts"], head["model"]
    return Answers(facts, model, runs)


def _write_lines(path: str | Path, file_format: str, head: JsonDict, lines: Iterable[JsonDict]) -> None:
    head = {"format": file_format, "version": FORMAT_VERSION, **head}
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in (head, *lines))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(Path(path), text.encode())


@contextmanager
def _read_lines(path: str | Path, file_format: str, option: str) -> Iterator[tuple[JsonDict, list[JsonDict]]]:
    """The first line of a file and all others. Damage found here or by the caller raises FileProblem."""
    try:
        head, *lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n") if line]
        if (head["format"], head["version"]) != (file_format, FORMAT_VERSION):
            kind = file_format.removeprefix("loopformer-")
            raise FileProblem(f"{path} is no file of {kind} of this version; write it with {option}.")
        yield head, lines
    except LoopformerError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise FileProblem(f"{path} cannot be read; write it with {option}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileProblem(f"{path} is damaged; write it again with {option}.") from error
