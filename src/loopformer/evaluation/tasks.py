"""What benchmarks ask a model, as plain data, and our answers; lm-evaluation-harness itself is not needed here.

    PAPER["arc"].tasks                                # ("arc_easy", "arc_challenge"), averaged into one
    read_local("data/eval", "hellaswag")              # a file's examples in the form that the harness expects
    query = Query("loglikelihood", ("The sky is", " blue"))
    answer(lm, [query], [trajectory])[trajectory].values      # [[-1.25, True]]
    write_requests("requests.jsonl", Requests(facts, {"copa": [query]}))      # for a machine without the harness

The paper's ten benchmarks are eleven tasks of the harness. The paper reports normalised accuracy where the harness
has it, and the mean of both ARC tasks. Local files are JSON lines named TASK.SPLIT.jsonl, one example a line with
the data set's own fields, as listed in docs/benchmarks.md.

Kinds of requests and their arguments are the harness's own:
    loglikelihood          (context, continuation) → [log-likelihood, whether greedy decoding would have given it]
    loglikelihood_rolling  (text,)                 → log-likelihood, each token given as much before it as fits
    generate_until         (context, settings)     → the text up to a stop string

Files of requests and answers are JSON lines. The first line says what the file is; then one request a line, or the
answers of one (trajectory, task) a line. Log-likelihoods keep every digit, so nothing changes on the way.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import FileProblem, LoopformerError
from loopformer.files import write_atomic
from loopformer.inference.request import Request
from loopformer.inference.sampling import Sampling
from loopformer.scoring import BATCH_TOKENS, Count, Span, loglikelihoods
from loopformer.trajectory import Trajectory

if TYPE_CHECKING:
    from loopformer.lm import LM

TaskExample = dict[str, Any]

KINDS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
MAX_NEW_TOKENS = 256  # where a task does not say; the harness's own default
REQUESTS, ANSWERS, VERSION = "loopformer-requests", "loopformer-answers", 1

_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # names of the same, by rank
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_UNCLEANED = ("activity_label", "ctx_a", "ctx_b", "endings", "label")  # HellaSwag as it is on the Hub


@dataclass(frozen=True)
class Task:
    """One task of the harness and its local form."""

    metric: str  # what the paper reports
    folder: str  # of its definition, under the harness's lm_eval/tasks
    split: str  # the split that the harness scores
    examples: int  # in that split
    fields: tuple[str, ...]  # of an example
    file: str = ""  # first part of the local file's name, where it is not the task's
    labels: tuple[int | str, ...] = ()  # what the last field may be, where that says which choice is right


@dataclass(frozen=True)
class Benchmark:
    """One column of the paper's table."""

    label: str
    tasks: tuple[str, ...]


_ARC = ("question", "choices", "answerKey")


TASKS = {
    "copa": Task(
        "acc",
        "super_glue/copa",
        "validation",
        100,
        ("premise", "choice1", "choice2", "question", "label"),
        labels=(0, 1),
    ),
    "hellaswag": Task(
        "acc_norm",
        "hellaswag",
        "validation",
        10_042,
        ("query", "choices", "label"),
        labels=(0, 1, 2, 3, "0", "1", "2", "3"),
    ),
    "lambada_openai": Task("acc", "lambada", "test", 5_153, ("text",)),
    "openbookqa": Task("acc_norm", "openbookqa", "test", 500, ("question_stem", "choices", "answerKey")),
    "piqa": Task("acc_norm", "piqa", "validation", 1_838, ("goal", "sol1", "sol2", "label"), labels=(0, 1)),
    "race": Task("acc", "race", "test", 1_045, ("article", "problems"), file="race_high"),
    "social_iqa": Task(
        "acc",
        "siqa",
        "validation",
        1_954,
        ("context", "question", "answerA", "answerB", "answerC", "label"),
        labels=(1, 2, 3, "1", "2", "3"),
    ),
    "arc_easy": Task("acc_norm", "arc", "test", 2_376, _ARC),
    "arc_challenge": Task("acc_norm", "arc", "test", 1_172, _ARC),
    "sciq": Task(
        "acc_norm",
        "sciq",
        "test",
        1_000,
        ("question", "correct_answer", "distractor1", "distractor2", "distractor3", "support"),
    ),
    "winogrande": Task(
        "acc", "winogrande", "validation", 1_267, ("sentence", "option1", "option2", "answer"), labels=("1", "2")
    ),
}


PAPER = {
    "copa": Benchmark("COPA", ("copa",)),
    "hellaswag": Benchmark("HellaSwag", ("hellaswag",)),
    "lambada": Benchmark("LAMBADA", ("lambada_openai",)),
    "openbookqa": Benchmark("OpenBookQA", ("openbookqa",)),
    "piqa": Benchmark("PIQA", ("piqa",)),
    "race": Benchmark("RACE", ("race",)),
    "social_iqa": Benchmark("Social IQa", ("social_iqa",)),
    "arc": Benchmark("ARC", ("arc_easy", "arc_challenge")),
    "sciq": Benchmark("SciQ", ("sciq",)),
    "winogrande": Benchmark("WinoGrande", ("winogrande",)),
}


@dataclass(frozen=True)
class Local:
    """A local file's examples, as the harness's own definition of the task reads them."""

    file: str
    sha256: str
    examples: tuple[TaskExample, ...]
    cleaned: bool  # the harness's own preparation of the examples is done already
    note: str | None  # how this is not what the harness scores


def paper_scores(values: Mapping[str, float]) -> dict[str, float] | None:
    """The paper's ten scores and their average, from one value per task; None unless all eleven are there."""
    if not TASKS.keys() <= values.keys():
        return None
    scores = {
        name: sum(values[task] for task in benchmark.tasks) / len(benchmark.tasks)
        for name, benchmark in PAPER.items()
    }
    return {**scores, "average": sum(scores.values()) / len(scores)}


def read_local(folder: str | Path, name: str) -> Local:
    """The local form of a task: the split that the harness scores, else a stand-in, of which `note` tells."""
    task = TASKS[name]
    path = _find(Path(folder), name, task)
    content = path.read_bytes()
    examples = _examples(path, content, task, name)
    if name == "race":  # its problems are the text of a Python list on the Hub
        examples = [
            each if isinstance(each["problems"], str) else {**each, "problems": repr(each["problems"])}
            for each in examples
        ]
    split = path.name.removeprefix(f"{task.file or name}.").removesuffix(".jsonl").rstrip("0123456789")
    notes = []
    if split != task.split:
        notes.append(f"the {split} split instead of {task.split}")
    if len(examples) != task.examples:
        notes.append(f"{len(examples):,} examples instead of {task.examples:,}")
    note = f"{name} is a stand-in: {', '.join(notes)}." if notes else None
    cleaned = name == "hellaswag" and "query" in examples[0]
    return Local(path.name, hashlib.sha256(content).hexdigest(), tuple(examples), cleaned, note)


def _find(folder: Path, name: str, task: Task) -> Path:
    """The task's own split first, whole before in part, then another one."""
    if not folder.is_dir():
        raise FileProblem(f"There is no folder {folder}; --data takes one with files like copa.validation.jsonl.")
    stem = task.file or name
    others = [split for split in ("test", "validation") if split != task.split]
    for split in (task.split, *others):
        for path in (folder / f"{stem}.{split}.jsonl", *sorted(folder.glob(f"{stem}.{split}[0-9]*.jsonl"))):
            if path.is_file():
                return path
    raise FileProblem(
        f"{folder} has no data for {name}; put {stem}.{task.split}.jsonl there, or leave {name} out of --tasks."
    )


def _examples(path: Path, content: bytes, task: Task, name: str) -> list[TaskExample]:
    """The file's lines, each with the fields that the task needs."""
    examples = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            example = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise FileProblem(f"Line {number} of {path} is no JSON; the file is damaged.") from error
        if not isinstance(example, dict):
            raise FileProblem(f"Line {number} of {path} is no JSON object; it should be an example of {name}.")
        fields = _UNCLEANED if name == "hellaswag" and "ctx_a" in example else task.fields
        missing = next((field for field in fields if field not in example), None)
        if missing:
            raise FileProblem(f"Line {number} of {path} has no field {missing}; is this the file of another task?")
        _check_label(f"Line {number} of {path}", fields[-1], example, task)
        examples.append(example)
    if not examples:
        raise FileProblem(f"{path} is empty; it should hold the examples of {name}, one a line.")
    return examples


def _check_label(where: str, field: str, example: TaskExample, task: Task) -> None:
    """Refuse an example that does not say which choice is right; the harness would score it all the same."""
    choices = example.get("choices")
    labels = task.labels or (choices.get("label") if isinstance(choices, dict) else None)
    if not isinstance(labels, list | tuple):
        return  # what is right is not said by a label, or the harness will stumble over the choices
    label = example[field]
    plain = label.lstrip() if isinstance(label, str) else label  # as OpenBookQA has some
    if not any(type(plain) is type(known) and plain == known for known in labels):
        allowed = ", ".join(json.dumps(known) for known in labels)
        raise FileProblem(
            f"{where} has the {field} {json.dumps(label)}, which is none of {allowed}; "
            "take a split that has labels, or mend the line."
        )


@dataclass(frozen=True)
class Query:
    """One request of a task."""

    kind: str
    arguments: tuple[Any, ...]

    @property
    def line(self) -> str:
        """As one line of JSON, always the same for the same request."""
        return json.dumps([self.kind, *self.arguments], ensure_ascii=False, sort_keys=True)


@dataclass(frozen=True)
class Answered:
    """Answers in the order asked, in plain data, and what they took."""

    values: list[Any]
    tokens: int  # run through the model, padding not counted
    cut: int  # requests whose text did not fit the context and lost its beginning
    seconds: float


Queries = Mapping[str, list[Query]]  # of each task
TaskAnswers = Mapping[str, Answered]  # of each task


def digest(queries: Sequence[Query]) -> str:
    """One hash for a list of requests."""
    return hashlib.sha256("\n".join(query.line for query in queries).encode()).hexdigest()


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> list[Span]:
    """Contexts and their continuations as tokens, exactly as lm-evaluation-harness splits them.

    Spaces at the end of a context belong to the continuation; both are tokenized together and the context's own
    number of tokens is taken off. An empty context is the end token.
    """
    splits = [(context.rstrip(), context + continuation) for context, continuation in pairs]
    texts = list({text for split in splits for text in split})
    ids = dict(zip(texts, tokenizer.encode_batch(texts), strict=True))
    spans = []
    for (context, continuation), (head, whole) in zip(pairs, splits, strict=True):
        before, scored = ids[head], ids[whole][len(ids[head]) :]
        if not before:
            before, scored = (
                (scored[:1], scored[1:]) if scored[:1] == [tokenizer.eot] else ([tokenizer.eot], scored)
            )
        if not scored:
            raise LoopformerError(
                f"The continuation {continuation[:40]!r} adds no token to its context {context[-40:]!r}; "
                "the task cannot be scored with this tokenizer."
            )
        spans.append(Span((*before, *scored), len(scored)))
    return spans


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Span]:
    """Whole texts, scored from their first token on, which follows the end token."""
    return [Span.text(ids, tokenizer.eot) for ids in tokenizer.encode_batch(texts)]


def answer(
    lm: LM,
    queries: Sequence[Query],
    trajectories: Sequence[Trajectory],
    batch_tokens: int = BATCH_TOKENS,
    count: Count | None = None,
) -> dict[Trajectory, Answered]:
    """Answer requests of any kinds along each trajectory, which is said to have taken its share of the time."""
    started = time.perf_counter()
    values: dict[Trajectory, list[Any]] = {trajectory: [None] * len(queries) for trajectory in trajectories}
    tokens, cut = dict.fromkeys(trajectories, 0), dict.fromkeys(trajectories, 0)
    for kind in sorted({query.kind for query in queries}):
        if kind not in KINDS:
            raise LoopformerError(f"A request of the kind {kind!r} is none that we answer: {', '.join(KINDS)}.")
        places = [place for place, query in enumerate(queries) if query.kind == kind]
        arguments = [queries[place].arguments for place in places]
        if kind == "generate_until":
            answers = {each: _generate(lm, arguments, each, batch_tokens, count) for each in trajectories}
        else:
            answers = _score(lm, kind, arguments, trajectories, batch_tokens, count)
        for trajectory, (answered, run, too_long) in answers.items():
            for place, value in zip(places, answered, strict=True):
                values[trajectory][place] = value
            tokens[trajectory] += run
            cut[trajectory] += too_long
    seconds = (time.perf_counter() - started) / max(1, len(values))
    return {each: Answered(values[each], tokens[each], cut[each], seconds) for each in values}


def _score(
    lm: LM,
    kind: str,
    arguments: Sequence[Any],
    trajectories: Sequence[Trajectory],
    batch_tokens: int,
    count: Count | None,
) -> dict[Trajectory, tuple[list[Any], int, int]]:
    """Of each trajectory the answers, the tokens run, and how many requests did not fit the context."""
    tokenizer, rolling = lm.need_tokenizer(), kind == "loglikelihood_rolling"
    if rolling:
        spans = encode_texts(tokenizer, [text for (text,) in arguments])
    else:
        spans = encode_pairs(tokenizer, [(context, continuation) for context, continuation in arguments])
    answers: dict[Trajectory, tuple[list[Any], int, int]] = {}
    for trajectory, scored in loglikelihoods(lm.model, spans, trajectories, batch_tokens, count=count).items():
        if rolling:  # a long text is read in parts, nothing of it is lost
            answers[trajectory] = [total for total, _ in scored.answers], scored.tokens, 0
        else:
            answers[trajectory] = [list(pair) for pair in scored.answers], scored.tokens, scored.cut
    return answers


def _generate(
    lm: LM, arguments: Sequence[Any], trajectory: Trajectory, batch_tokens: int, count: Count | None
) -> tuple[list[Any], int, int]:
    """Texts, prompts of about the same length together; tokens run, and how many prompts did not fit."""
    tokenizer, context = lm.need_tokenizer(), lm.model.config.context
    prompts = tokenizer.encode_batch([prompt for prompt, _ in arguments])
    requests, cut = [], 0
    for number, (ids, (_, settings)) in enumerate(zip(prompts, arguments, strict=True)):
        new, stops, sampling = _settings(settings, seed=number)
        if new >= context:
            raise LoopformerError(
                f"The task asks for up to {new} new tokens but the context is {context}; "
                "set max_gen_toks below it in the task's generation_kwargs."
            )
        cut += len(ids) > context - new
        prompt = ids[-(context - new) :] or [tokenizer.eot]
        requests.append(Request(tuple(prompt), trajectory, sampling, new, stops))
    order = sorted(range(len(requests)), key=lambda number: -len(requests[number].prompt))
    rows = max(1, batch_tokens // context)
    texts: list[Any] = [""] * len(requests)
    tokens = 0
    for start in range(0, len(order), rows):
        batch = order[start : start + rows]
        for event in lm.events([requests[number] for number in batch]):
            if event.result is not None:
                texts[batch[event.ticket]] = event.result.text
                tokens += event.result.prompt_tokens + len(event.result.ids)
        if count:
            count(start + len(batch), len(order))
    return texts, tokens, cut


def _settings(generation_kwargs: Mapping[str, Any], seed: int) -> tuple[int, tuple[str, ...], Sampling]:
    """New tokens at most, stop strings and sampling, from a task's generation_kwargs."""
    settings = dict(generation_kwargs)
    until = settings.pop("until", None) or []
    stops = (until,) if isinstance(until, str) else tuple(until)
    limits = [settings.pop(name, None) for name in _LIMITS]
    new = int(next((limit for limit in limits if limit is not None), MAX_NEW_TOKENS))
    sampling = {name: settings.pop(name) for name in _SAMPLING if settings.get(name) is not None}
    sampling["temperature"] = float(sampling.get("temperature", 0.0))
    if settings.pop("do_sample", None) is False:
        sampling["temperature"] = 0.0
    if settings.pop("num_beams", 1) != 1 or settings:
        names = ", ".join(settings) or "num_beams"
        raise LoopformerError(f"The task sets {names} for generation, which we do not have; leave it out.")
    return new, stops, Sampling(**sampling, seed=seed)


@dataclass(frozen=True)
class Requests:
    """All requests of some tasks; `facts` is what the harness needs to build the same tasks again.

    facts["tasks"][name]["requests_sha256"] is the hash of a task's requests, which shows that a file is whole.
    """

    facts: Mapping[str, Any]
    queries: Queries


@dataclass(frozen=True)
class Answers:
    """Answers of one model to all requests, along each trajectory."""

    facts: Mapping[str, Any]
    model: Mapping[str, Any]
    runs: Mapping[str, TaskAnswers]  # by trajectory


def write_requests(path: str | Path, requests: Requests) -> None:
    lines = (
        {"task": task, "kind": query.kind, "arguments": query.arguments}
        for task, queries in requests.queries.items()
        for query in queries
    )
    _write(path, {"format": REQUESTS, "version": VERSION, "facts": requests.facts}, lines)


def read_requests(path: str | Path) -> Requests:
    head, lines = _read(path, REQUESTS, "write it with --export-requests")
    queries: dict[str, list[Query]] = {}
    try:
        for line in lines:
            queries.setdefault(line["task"], []).append(Query(line["kind"], tuple(line["arguments"])))
        expected = {task: facts["requests_sha256"] for task, facts in head["facts"]["tasks"].items()}
        whole = expected == {task: digest(requests) for task, requests in queries.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(path) from error
    if not whole:
        raise _damaged(path)
    return Requests(head["facts"], queries)


def write_answers(path: str | Path, answers: Answers) -> None:
    head = {"format": ANSWERS, "version": VERSION, "facts": answers.facts, "model": answers.model}
    lines = (
        {"trajectory": trajectory, "task": task, **asdict(answered)}
        for trajectory, run in answers.runs.items()
        for task, answered in run.items()
    )
    _write(path, head, lines)


def read_answers(path: str | Path) -> Answers:
    head, lines = _read(path, ANSWERS, "write it with --score-requests")
    runs: dict[str, dict[str, Answered]] = {}
    try:
        for line in lines:
            trajectory, task = line.pop("trajectory"), line.pop("task")
            runs.setdefault(trajectory, {})[task] = Answered(**line)
        return Answers(head["facts"], head["model"], runs)
    except (KeyError, TypeError) as error:
        raise _damaged(path) from error


def _write(path: str | Path, head: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in (head, *lines))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(Path(path), text.encode())


def _read(path: str | Path, expected: str, how: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileProblem(f"{path} cannot be read; {how}.") from error
    try:
        head, *lines = [json.loads(line) for line in text.split("\n") if line]
    except (ValueError, RecursionError) as error:
        raise _damaged(path) from error
    if not isinstance(head, dict) or head.get("format") != expected:
        kind = "requests" if expected == REQUESTS else "answers"
        raise FileProblem(f"{path} is no file of {kind}; {how}.")
    if head.get("version") != VERSION:
        version = head.get("version")
        raise FileProblem(f"{path} has version {version!r}, this loopformer reads {VERSION}; update it.")
    return head, lines


def _damaged(path: str | Path) -> FileProblem:
    return FileProblem(f"{path} is damaged; write it again.")
