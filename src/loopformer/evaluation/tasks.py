"""The paper's tasks, requests as plain data, and a model's answers to them; lm-evaluation-harness is not needed.

    PAPER["arc"].tasks                                # ("arc_easy", "arc_challenge"), averaged into one score
    read_examples("data/eval", "hellaswag")           # the examples of a file, in the form the harness expects
    query = Query("loglikelihood", ("The sky is", " blue"))
    answer_requests(lm, [query], [trajectory])[trajectory].values      # [[-1.25, True]]
    runs = run_requests(loaded, {"copa": [query]}, [trajectory])    # by trajectory and task, finished ones stored
    write_requests("requests.jsonl", Requests(facts, {"copa": [query]}))      # for a machine without the harness

The paper's ten scores come from eleven tasks of the harness. The paper reports normalised accuracy where the
harness has it, and the mean of both ARC tasks. Local files are JSON lines named TASK.SPLIT.jsonl, one example per
line with the fields of the data set, as listed in docs/benchmarks.md.

Kinds of requests and their arguments are those of the harness:
    loglikelihood          (context, continuation) → [log-likelihood, whether greedy decoding would give it]
    loglikelihood_rolling  (text,)                 → log-likelihood, each token given as much before it as fits
    generate_until         (context, settings)     → the text up to a stop string

Files of requests and answers are JSON lines. The first line says what the file is. Each other line is one request,
or the answers of one trajectory to one task. Log-likelihoods keep every digit.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from loopformer.data.tokenizer import Tokenizer
from loopformer.errors import FileProblem, LoopformerError
from loopformer.evaluation.store import JsonDict, LoadedModel, ReportProgress
from loopformer.files import write_atomic
from loopformer.inference.request import Request
from loopformer.inference.sampling import Sampling
from loopformer.lm import LM
from loopformer.scoring import BATCH_TOKENS, Count, Span, loglikelihoods
from loopformer.trajectory import Trajectory

TaskExample = dict[str, Any]

KINDS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
MAX_NEW_TOKENS = 256  # where a task does not say; the harness's own default
REQUESTS_FORMAT, ANSWERS_FORMAT, FORMAT_VERSION = "loopformer-requests", "loopformer-answers", 1

_LIMIT_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first given counts
_SAMPLING_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_UNCLEANED_FIELDS = "activity_label ctx_a ctx_b endings label"  # fields of HellaSwag as it is on the Hub


@dataclass(frozen=True)
class Task:
    """A task of the harness and its local form."""

    metric: str  # what the paper reports
    folder: str  # of its definition, under the harness's lm_eval/tasks
    split: str  # the split that the harness scores
    examples: int  # in that split
    fields: str  # of an example, in one string
    file: str = ""  # first part of the local file's name, where it is not the task's
    labels: tuple[int | str, ...] = ()  # values of the last field, where it says which choice is right


TASKS = {
    "copa": Task("acc", "super_glue/copa", "validation", 100, "premise choice1 choice2 question label", "", (0, 1)),
    "hellaswag": Task(
        "acc_norm", "hellaswag", "validation", 10_042, "query choices label", "", (0, 1, 2, 3, "0", "1", "2", "3")
    ),
    "lambada_openai": Task("acc", "lambada", "test", 5_153, "text"),
    "openbookqa": Task("acc_norm", "openbookqa", "test", 500, "question_stem choices answerKey"),
    "piqa": Task("acc_norm", "piqa", "validation", 1_838, "goal sol1 sol2 label", "", (0, 1)),
    "race": Task("acc", "race", "test", 1_045, "article problems", "race_high"),
    "social_iqa": Task(
        "acc",
        "siqa",
        "validation",
        1_954,
        "context question answerA answerB answerC label",
        "",
        (1, 2, 3, "1", "2", "3"),
    ),
    "arc_easy": Task("acc_norm", "arc", "test", 2_376, "question choices answerKey"),
    "arc_challenge": Task("acc_norm", "arc", "test", 1_172, "question choices answerKey"),
    "sciq": Task(
        "acc_norm", "sciq", "test", 1_000, "question correct_answer distractor1 distractor2 distractor3 support"
    ),
    "winogrande": Task("acc", "winogrande", "validation", 1_267, "sentence option1 option2 answer", "", ("1", "2")),
}


@dataclass(frozen=True)
class PaperScore:
    """One column of the paper's table."""

    label: str
    tasks: tuple[str, ...]


PAPER = {
    "copa": PaperScore("COPA", ("copa",)),
    "hellaswag": PaperScore("HellaSwag", ("hellaswag",)),
    "lambada": PaperScore("LAMBADA", ("lambada_openai",)),
    "openbookqa": PaperScore("OpenBookQA", ("openbookqa",)),
    "piqa": PaperScore("PIQA", ("piqa",)),
    "race": PaperScore("RACE", ("race",)),
    "social_iqa": PaperScore("Social IQa", ("social_iqa",)),
    "arc": PaperScore("ARC", ("arc_easy", "arc_challenge")),
    "sciq": PaperScore("SciQ", ("sciq",)),
    "winogrande": PaperScore("WinoGrande", ("winogrande",)),
}


def paper_scores(values: Mapping[str, float]) -> dict[str, float] | None:
    """The paper's ten scores and their average, from one value per task; None unless all eleven are there."""
    if not TASKS.keys() <= values.keys():
        return None
    scores = {name: sum(values[task] for task in score.tasks) / len(score.tasks) for name, score in PAPER.items()}
    return {**scores, "average": sum(scores.values()) / len(scores)}


# Local files of the paper's tasks.


@dataclass(frozen=True)
class LocalExamples:
    """The examples of a local file, as the harness's definition of the task reads them."""

    file: str
    sha256: str
    examples: tuple[TaskExample, ...]
    cleaned: bool  # the harness's preparation of the examples is already done
    note: str | None  # how this differs from what the harness scores


def read_examples(folder: str | Path, name: str) -> LocalExamples:
    """The local form of a task: the split that the harness scores, else a stand-in that `note` describes."""
    task, path = TASKS[name], _find_file(Path(folder), name)
    content = path.read_bytes()
    examples = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            examples.append(_parse_example(line, f"Line {number} of {path}", name))
    if not examples:
        raise FileProblem(f"{path} is empty; it should hold the examples of {name}, one a line.")
    if name == "race":  # on the Hub the problems are the text of a Python list
        for example in examples:
            problems = example["problems"]
            example["problems"] = problems if isinstance(problems, str) else repr(problems)
    split = path.name.removeprefix(f"{task.file or name}.").removesuffix(".jsonl").rstrip("0123456789")
    notes = []
    if split != task.split:
        notes.append(f"the {split} split instead of {task.split}")
    if len(examples) != task.examples:
        notes.append(f"{len(examples):,} examples instead of {task.examples:,}")
    note = f"{name} is a stand-in: {', '.join(notes)}." if notes else None
    cleaned = name == "hellaswag" and "query" in examples[0]
    return LocalExamples(path.name, hashlib.sha256(content).hexdigest(), tuple(examples), cleaned, note)


def _find_file(folder: Path, name: str) -> Path:
    """The file of the task's own split if there is one, in full before in part, else of another split."""
    if not folder.is_dir():
        raise FileProblem(f"There is no folder {folder}; --data takes one with files like copa.validation.jsonl.")
    stem, own_split = TASKS[name].file or name, TASKS[name].split
    for split in dict.fromkeys([own_split, "test", "validation"]):
        for path in (folder / f"{stem}.{split}.jsonl", *sorted(folder.glob(f"{stem}.{split}[0-9]*.jsonl"))):
            if path.is_file():
                return path
    raise FileProblem(
        f"{folder} has no data for {name}; put {stem}.{own_split}.jsonl there, or leave {name} out of --tasks."
    )


def _parse_example(line: bytes, where: str, name: str) -> TaskExample:
    """The example in a line of a file, refused unless it has all fields and says which choice is right."""
    try:
        example = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FileProblem(f"{where} is no JSON; the file is damaged.") from error
    if not isinstance(example, dict):
        raise FileProblem(f"{where} is no JSON object; it should be an example of {name}.")
    task = TASKS[name]
    fields = (_UNCLEANED_FIELDS if name == "hellaswag" and "ctx_a" in example else task.fields).split()
    for field in fields:
        if field not in example:
            raise FileProblem(f"{where} has no field {field}; is this the file of another task?")
    # The harness would score an example with a wrong label all the same.
    choices, label = example.get("choices"), example[fields[-1]]
    labels = task.labels or (choices.get("label") if isinstance(choices, dict) else None)
    if isinstance(labels, list | tuple):
        plain = label.lstrip() if isinstance(label, str) else label  # some labels of OpenBookQA begin with a space
        if not any(type(plain) is type(known) and plain == known for known in labels):
            allowed = ", ".join(json.dumps(known) for known in labels)
            raise FileProblem(
                f"{where} has the {fields[-1]} {json.dumps(label)}, which is none of {allowed}; "
                "take a split that has labels, or mend the line."
            )
    return example


# Requests and answers.


@dataclass(frozen=True)
class Query:
    """One request of a task."""

    kind: str
    arguments: tuple[Any, ...]

    @property
    def line(self) -> str:
        """The request as one line of JSON, always the same for the same request."""
        return json.dumps([self.kind, *self.arguments], ensure_ascii=False, sort_keys=True)


@dataclass
class TaskAnswers:
    """Answers in the order of the requests, in plain data, and what they cost."""

    values: list[Any]
    tokens: int  # run through the model, without padding
    cut: int  # requests that did not fit the context and lost their beginning
    seconds: float


Queries = Mapping[str, list[Query]]  # by task


def hash_requests(queries: Sequence[Query]) -> str:
    """One hash for a list of requests."""
    return hashlib.sha256("\n".join(query.line for query in queries).encode()).hexdigest()


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> list[Span]:
    """Contexts and their continuations as tokens, split exactly as lm-evaluation-harness splits them.

    Spaces at the end of a context belong to the continuation. Both are tokenized together, and the number of tokens
    that the context has alone is taken off. An empty context becomes the end token.
    """
    splits = [(context.rstrip(), context + continuation) for context, continuation in pairs]
    texts = list({text for split in splits for text in split})
    ids = dict(zip(texts, tokenizer.encode_batch(texts), strict=True))
    spans = []
    for (context, continuation), (head, both) in zip(pairs, splits, strict=True):
        before, scored = ids[head], ids[both][len(ids[head]) :]
        if not before:
            before = [tokenizer.eot]
            scored = scored[1:] if scored[:1] == before else scored
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


def answer_requests(
    lm: LM,
    queries: Sequence[Query],
    trajectories: Sequence[Trajectory],
    batch_tokens: int = BATCH_TOKENS,
    count: Count | None = None,
) -> dict[Trajectory, TaskAnswers]:
    """The answers to requests of any kinds along each trajectory, which is charged its share of the time."""
    started = time.perf_counter()
    tokenizer = lm.need_tokenizer()
    answers = {trajectory: TaskAnswers([None] * len(queries), 0, 0, 0.0) for trajectory in trajectories}
    for kind in sorted({query.kind for query in queries}):
        if kind not in KINDS:
            raise LoopformerError(
                f"Requests of the kind {kind!r} are not supported; the kinds are {', '.join(KINDS)}."
            )
        numbers = [number for number, query in enumerate(queries) if query.kind == kind]
        arguments = [queries[number].arguments for number in numbers]
        results: dict[Trajectory, tuple[list[Any], int, int]] = {}  # values, tokens, cut
        if kind == "generate_until":
            for trajectory in trajectories:
                results[trajectory] = _generate(lm, arguments, trajectory, batch_tokens, count)
        else:
            is_rolling = kind == "loglikelihood_rolling"
            if is_rolling:  # scored in parts, so nothing of a long text is cut
                spans = encode_texts(tokenizer, [text for (text,) in arguments])
            else:
                spans = encode_pairs(tokenizer, [(context, continuation) for context, continuation in arguments])
            scores = loglikelihoods(lm.model, spans, trajectories, batch_tokens, count=count)
            for trajectory, scored in scores.items():
                values = [total if is_rolling else [total, greedy] for total, greedy in scored.answers]
                results[trajectory] = values, scored.tokens, 0 if is_rolling else scored.cut
        for trajectory, (values, tokens, cut) in results.items():
            for number, value in zip(numbers, values, strict=True):
                answers[trajectory].values[number] = value
            answers[trajectory].tokens += tokens
            answers[trajectory].cut += cut
    for answered in answers.values():
        answered.seconds = (time.perf_counter() - started) / len(answers)
    return answers


def _generate(
    lm: LM, arguments: Sequence[Any], trajectory: Trajectory, batch_tokens: int, count: Count | None
) -> tuple[list[Any], int, int]:
    """The texts, the tokens run, and how many prompts did not fit; prompts of similar length share a batch."""
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
    """The maximum of new tokens, the stop strings and the sampling that a task's generation_kwargs ask for."""
    settings = dict(generation_kwargs)
    until = settings.pop("until", None) or []
    stops = (until,) if isinstance(until, str) else tuple(until)
    limits = [settings.pop(name, None) for name in _LIMIT_NAMES]
    new = int(next((limit for limit in limits if limit is not None), MAX_NEW_TOKENS))
    sampling = {name: settings.pop(name) for name in _SAMPLING_NAMES if settings.get(name) is not None}
    sampling["temperature"] = float(sampling.get("temperature", 0.0))
    if settings.pop("do_sample", None) is False:
        sampling["temperature"] = 0.0
    if settings.pop("num_beams", 1) != 1 or settings:
        names = ", ".join(settings) or "num_beams"
        raise LoopformerError(f"The task sets {names} for generation, which is not supported; leave it out.")
    return new, stops, Sampling(**sampling, seed=seed)


def run_requests(
    loaded: LoadedModel,
    queries: Queries,
    trajectories: Sequence[Trajectory],
    batch_tokens: int = BATCH_TOKENS,
    report: ReportProgress | None = None,
    together: bool = False,
) -> dict[str, dict[str, TaskAnswers]]:
    """The answers to the requests of each task along each trajectory, by trajectory and task.

    The answers of one trajectory to one task are stored as soon as they are complete, and come from the store the
    next time. `together` computes once what the trajectories share, and charges each an equal share of the time.
    """
    kind = "answers, time shared" if together else "answers"
    hashes = {task: hash_requests(requests) for task, requests in queries.items()}
    runs: dict[str, dict[str, TaskAnswers]] = {str(trajectory): {} for trajectory in trajectories}
    for group in [list(trajectories)] if together else [[trajectory] for trajectory in trajectories]:
        for task, requests in queries.items():
            about = {"kind": kind, **loaded.identity, "task": task, "requests": hashes[task]}
            keys = {trajectory: {**about, "trajectory": str(trajectory)} for trajectory in group}
            for trajectory, key in keys.items():
                if (piece := loaded.store.get(key)) is not None:
                    runs[str(trajectory)][task] = TaskAnswers(**piece)
            missing = [trajectory for trajectory in group if task not in runs[str(trajectory)]]
            if not missing:
                continue
            along = f"M={missing[0].budget}" if missing[0].is_uniform else str(missing[0])
            along = along if len(missing) == 1 else f"{len(missing)} schedules"
            count = None if report is None else partial(report, f"{task} {along}")
            for trajectory, answered in answer_requests(loaded.lm, requests, missing, batch_tokens, count).items():
                loaded.store.put(keys[trajectory], asdict(answered))
                runs[str(trajectory)][task] = answered
    return runs


def model_facts(loaded: LoadedModel, runs: Iterable[str]) -> JsonDict:
    """What was evaluated, and what a token of it costs along each trajectory."""
    config, cost = loaded.model.config, loaded.model.cost
    return {
        "path": loaded.source,
        "shape": f"{config.blocks}⊗{config.loops}",
        "context": config.context,
        **loaded.identity,
        "flops_per_token": {name: cost.forward_flops(Trajectory.parse(name).budget) for name in runs},
    }


# Files of requests and answers.


@dataclass(frozen=True)
class Requests:
    """All requests of some tasks; `facts` is what the harness needs to build the same tasks again.

    facts["tasks"][name]["requests_sha256"] is the hash of a task's requests, which shows that a file is complete.
    """

    facts: Mapping[str, Any]
    queries: Queries


@dataclass(frozen=True)
class Answers:
    """The answers of one model to all requests, along each trajectory."""

    facts: Mapping[str, Any]
    model: Mapping[str, Any]
    runs: Mapping[str, Mapping[str, TaskAnswers]]  # by trajectory


def write_requests(path: str | Path, requests: Requests) -> None:
    lines = (
        {"task": task, "kind": query.kind, "arguments": query.arguments}
        for task, queries in requests.queries.items()
        for query in queries
    )
    _write_lines(path, {"format": REQUESTS_FORMAT, "version": FORMAT_VERSION, "facts": requests.facts}, lines)


def read_requests(path: str | Path) -> Requests:
    head, lines = _read_lines(path, REQUESTS_FORMAT, "write it with --export-requests")
    queries: dict[str, list[Query]] = {}
    try:
        for line in lines:
            queries.setdefault(line["task"], []).append(Query(line["kind"], tuple(line["arguments"])))
        expected = {task: facts["requests_sha256"] for task, facts in head["facts"]["tasks"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(path) from error
    if expected != {task: hash_requests(requests) for task, requests in queries.items()}:
        raise _damaged(path)
    return Requests(head["facts"], queries)


def write_answers(path: str | Path, answers: Answers) -> None:
    head = {"format": ANSWERS_FORMAT, "version": FORMAT_VERSION, "facts": answers.facts, "model": answers.model}
    lines = (
        {"trajectory": trajectory, "task": task, **asdict(answered)}
        for trajectory, run in answers.runs.items()
        for task, answered in run.items()
    )
    _write_lines(path, head, lines)


def read_answers(path: str | Path) -> Answers:
    head, lines = _read_lines(path, ANSWERS_FORMAT, "write it with --score-requests")
    runs: dict[str, dict[str, TaskAnswers]] = {}
    try:
        for line in lines:
            trajectory, task = line.pop("trajectory"), line.pop("task")
            runs.setdefault(trajectory, {})[task] = TaskAnswers(**line)
        return Answers(head["facts"], head["model"], runs)
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(path) from error


def _write_lines(path: str | Path, head: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in (head, *lines))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(Path(path), text.encode())


def _read_lines(path: str | Path, expected: str, remedy: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    try:
        head, *lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n") if line]
    except (OSError, UnicodeDecodeError) as error:
        raise FileProblem(f"{path} cannot be read; {remedy}.") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path) from error
    if not isinstance(head, dict) or head.get("format") != expected:
        raise FileProblem(f"{path} is no file of {expected.removeprefix('loopformer-')}; {remedy}.")
    if head.get("version") != FORMAT_VERSION:
        version = head.get("version")
        raise FileProblem(f"{path} has version {version!r}, this loopformer reads {FORMAT_VERSION}; update it.")
    return head, lines


def _damaged(path: str | Path) -> FileProblem:
    return FileProblem(f"{path} is damaged; write it again.")
