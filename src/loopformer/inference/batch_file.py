"""A file of prompts becomes a file of answers, through the engine: in order, and continued where it was left.

    {"prompt": "Once upon a time", "budget": 2, "id": "a"}     # prompts.jsonl, a line each
    {"id": "a", "text": …, "reason": "length", …}              # answers.jsonl; or {"id": "a", "error": "…"}

    engine = lm.engine(rows=16, queue=16)
    done = answer_file(Path("prompts.jsonl"), Path("answers.jsonl"), engine, request_of, settings)

Prompts are read while others run, so a file may have any length. Answers stand in the order of the prompts, each
written whole when all before it are. Beside them, answers.jsonl.run.json says what decides them: the settings, and
how many prompts of which hash the file had. A file of answers that fits is continued, any other is refused; the
prompts may have become more meanwhile.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import IO, Any, NamedTuple

from loopformer.errors import REMOVED_CERTAINTY, FileProblem, LoopformerError, RunFailed, nearest, unreadable
from loopformer.files import append, opened_alone, read_json, write_json, writing
from loopformer.inference.engine import Engine
from loopformer.inference.request import Event, Request, Result

AHEAD = 4096  # prompts that may be under way or done while an earlier one still runs
VERSION = 1  # of what stands beside the answers
AnswerLine = dict[str, Any]
_NUMBER = ((int, float), "a number")
_WHOLE = ((int,), "a whole number")
_FIELDS: dict[str, tuple[tuple[type, ...], str]] = {
    "prompt": ((str,), "text"),
    "budget": _WHOLE,
    "trajectory": ((str,), "text such as 4-2-1-1"),
    "max_tokens": _WHOLE,
    "temperature": _NUMBER,
    "top_k": _WHOLE,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "repetition_penalty": _NUMBER,
    "seed": _WHOLE,
    "stop": ((str, list), "text or a list of texts"),
}


@dataclass(frozen=True)
class BatchReport:
    """What a file of answers holds now."""

    lines: int
    errors: int


def answer_file(
    source: Path,
    out: Path,
    engine: Engine,
    request_of: Callable[[dict[str, Any]], Request],
    settings: dict[str, Any],
    report: Callable[[int, int], object] = lambda done, total: None,
) -> BatchReport:
    """Answer every prompt of a file that is not answered yet.

    request_of   makes a request of the fields of a line, all of the right type; a LoopformerError is its answer
    settings     what the answers follow from besides the prompts, as plain JSON by names that a user knows
    report       is told how many prompts are answered, of how many
    """
    if source.is_fifo() or source.is_char_device():
        raise FileProblem(f"{source} cannot be read twice, as prompts are; write them to a file first.")
    new = not out.exists()
    with _opened(source) as lines, _opened_other(out, source) as file:
        try:
            total = _check_belongs(source, out, json.loads(json.dumps(settings)))
        except BaseException:
            if new and not out.stat().st_size:
                out.unlink()
            raise
        prompts = _prompts(lines)
        done, errors, end = _answered(source, out, prompts)
        with writing(out):
            file.truncate(end)
        report(done, total)
        for answer in _answers(engine, request_of, prompts):
            # A half of a surrogate pair, which an id may hold, becomes what JSON writes for it.
            append(file, out, (json.dumps(answer, ensure_ascii=False) + "\n").encode(errors="backslashreplace"))
            done, errors = done + 1, errors + ("error" in answer)
            report(done, max(done, total))
    if done < total:
        raise FileProblem(f"{source} has become shorter meanwhile; {done} of its {total} prompts are answered.")
    return BatchReport(done, errors)


def _opened(source: Path) -> IO[bytes]:
    try:
        return source.open("rb")
    except OSError as error:
        raise unreadable(source, error) from error


def _opened_other(out: Path, source: Path) -> AbstractContextManager[FileIO]:
    if out.exists() and out.samefile(source):
        raise FileProblem(f"{out} is the file of prompts itself; give another --out.")
    return opened_alone(out)


# Prompts: a line each.


class _Prompt(NamedTuple):
    """A line of the input: what its answer is called, and its fields, or what is wrong with it."""

    id: Any
    fields: dict[str, Any] | LoopformerError


def _prompts(lines: Iterable[bytes]) -> Iterator[_Prompt]:
    """The lines that are not blank; a line without an id is identified by its number."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name: Any = number
        fields: dict[str, Any] | LoopformerError
        try:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # a wrong encoding is a ValueError
                raise LoopformerError("The line is not JSON.") from error
            if not isinstance(record, dict):
                raise LoopformerError('The line is no object such as {"prompt": "…"}.')
            fields = {key: value for key, value in record.items() if value is not None}
            given = fields.pop("id", number)
            try:
                json.dumps(given, allow_nan=False)  # Python also reads NaN, and 1e999 as Infinity
            except ValueError as error:
                raise LoopformerError(
                    "The id has NaN or Infinity, which JSON cannot hold; give another."
                ) from error
            name = given
            _check_fields(fields)
        except LoopformerError as error:
            fields = error
        yield _Prompt(name, fields)


def _check_fields(fields: dict[str, Any]) -> None:
    """Refuse unknown fields and values of a wrong type. Their ranges are checked where they are used."""
    for name, value in fields.items():
        if name == "certainty":
            raise LoopformerError(REMOVED_CERTAINTY)
        if name not in _FIELDS:
            raise LoopformerError(f"Unknown field {name}; {nearest(name, [*_FIELDS, 'id'])}")
        types, wanted = _FIELDS[name]
        if isinstance(value, bool) or not isinstance(value, types):
            raise LoopformerError(f"{name} must be {wanted}, got {value!r}.")
    if "prompt" not in fields:
        raise LoopformerError("The line has no prompt; add one.")


# Answers, in the order of the prompts.


def _answers(
    engine: Engine, request_of: Callable[[dict[str, Any]], Request], prompts: Iterator[_Prompt]
) -> Iterator[AnswerLine]:
    """The answer to each prompt; the engine's queue is filled before every step."""
    pending: deque[AnswerLine] = deque()  # in the order of the prompts; only an id while a request runs
    by_ticket: dict[int, AnswerLine] = {}
    more = True
    while more or pending:
        while more and engine.room and len(pending) < AHEAD:
            prompt = next(prompts, None)
            if prompt is None:
                more = False
                break
            answer: AnswerLine = {"id": prompt.id}
            pending.append(answer)
            try:
                if isinstance(prompt.fields, LoopformerError):
                    raise prompt.fields
                by_ticket[engine.submit(request_of(prompt.fields))] = answer
            except LoopformerError as error:
                answer["error"] = str(error)
        if by_ticket:
            for event in _step(engine):
                if event.result is not None:
                    by_ticket.pop(event.ticket).update(_outcome(event.result))
        while pending and len(pending[0]) > 1:
            yield pending.popleft()


def _outcome(result: Result) -> AnswerLine:
    if result.error is not None:
        return {"error": result.error}
    return {
        "text": result.text,
        "reason": result.reason,
        "trajectory": str(result.trajectory),
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": len(result.ids),
    }


def _step(engine: Engine) -> list[Event]:
    """A step of the engine; one that failed is taken again as long as failing brings some request to its end."""
    left = None
    while True:
        try:
            return engine.step()
        except Exception as error:
            if left == (left := engine.waiting + engine.running):
                reason = " ".join(str(error).split()) or type(error).__name__
                raise RunFailed(
                    f"The engine failed twice in a row ({reason}); what is answered is kept, so free some memory "
                    "or lower --rows, and give the same command again."
                ) from error


# What was answered before.


def _check_belongs(source: Path, out: Path, settings: dict[str, Any]) -> int:
    """Refuse answers that are there and not of these prompts and settings, and note both; how many prompts."""
    beside = out.with_name(out.name + ".run.json")
    begun = out.stat().st_size > 0
    if begun and not beside.exists():
        raise FileProblem(f"{out} is there, and not known to be answers ({beside.name} is missing); {_other(out)}")
    before = read_json(beside) if begun else {"input": {"lines": 0}}
    if begun and before.get("version") != VERSION:
        raise FileProblem(f"{out} was begun by another version of loopformer; {_other(out)}")
    count, digest, of_known = _survey(source, before["input"]["lines"])
    if begun:
        earlier = before["settings"]
        changed = [name for name in {**settings, **earlier} if settings.get(name) != earlier.get(name)]
        if "weights" in changed or "tokenizer" in changed:
            raise FileProblem(f"{out} was begun with another model; {_other(out)}")
        if changed:
            raise FileProblem(f"{out} was begun with other options ({', '.join(changed)}); {_other(out)}")
        if of_known != before["input"]["sha256"]:
            raise FileProblem(f"{out} holds answers to other prompts than {source}; {_other(out)}")
    after = {"version": VERSION, "settings": settings, "input": {"lines": count, "sha256": digest}}
    if after != before:
        write_json(beside, after)
    return count


def _other(out: Path) -> str:
    return f"give another --out, or remove {out} to begin again."


def _survey(source: Path, first: int) -> tuple[int, str, str]:
    """How many lines of a file are not blank, the hash of these, and that of the first so many of them."""
    digest, count = hashlib.sha256(), 0
    of_first = digest.hexdigest()
    with _opened(source) as lines:
        for line in lines:
            if not line.strip():
                continue
            digest.update(line.rstrip(b"\r\n") + b"\n")
            count += 1
            if count == first:
                of_first = digest.hexdigest()
    return count, digest.hexdigest(), of_first


def _answered(source: Path, out: Path, prompts: Iterator[_Prompt]) -> tuple[int, int, int]:
    """Go past the prompts that are answered: how many, how many of them by an error, and where their answers end.

    A last line without its end was cut off, and does not count.
    """
    count = errors = end = 0
    with out.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            try:
                answer = json.loads(line)
            except (ValueError, RecursionError):
                answer = None
            prompt = next(prompts, None)
            if prompt is None or not isinstance(answer, dict) or answer.get("id") != prompt.id:
                raise FileProblem(
                    f"Line {count + 1} of {out} does not answer its prompt in {source}; {_other(out)}"
                )
            count, errors, end = count + 1, errors + ("error" in answer), end + len(line)
    return count, errors, end
