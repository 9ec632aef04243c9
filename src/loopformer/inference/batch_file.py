"""Answer a file of prompts in order, and continue after an interruption.

    {"prompt": "Once upon a time", "budget": 2, "id": "a"}     # prompts.jsonl, a line each
    {"id": "a", "text": …, "reason": "length", …}              # answers.jsonl; or {"id": "a", "error": "…"}

    engine = lm.engine(rows=16, queue=16)
    done = answer_file(Path("prompts.jsonl"), Path("answers.jsonl"), engine, request_of, settings)

Prompts are read while earlier ones run, so a file may have any length. An answer is written once all earlier ones
are, so answers have the order of the prompts. The file answers.jsonl.run.json records the settings, the number of
prompts, a hash of those that did not fail and a hash of each that did. A run resumes only if the settings and the
prompts that did not fail are unchanged. A prompt that failed is answered again once its line has been changed.
Prompts may be appended between runs.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from loopformer.errors import REMOVED, FileProblem, LoopformerError, RunFailed, nearest, unreadable
from loopformer.files import append_line, explain_write_errors, open_atomic, open_exclusive, read_json, write_json
from loopformer.inference.engine import Engine
from loopformer.inference.request import Event, Request

MAX_PENDING = 4096  # prompts in memory whose answers are not written yet, because an earlier one still runs
VERSION = 1  # the format of answers.jsonl.run.json
AnswerLine = dict[str, Any]
_NUMBER = ((int, float), "a number")
_INTEGER = ((int,), "a whole number")
_FIELDS: dict[str, tuple[tuple[type, ...], str]] = {
    "prompt": ((str,), "text"),
    "budget": _INTEGER,
    "trajectory": ((str,), "text such as 2-1-2-3"),
    "max_tokens": _INTEGER,
    "temperature": _NUMBER,
    "top_k": _INTEGER,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "repetition_penalty": _NUMBER,
    "seed": _INTEGER,
    "stop": ((str, list), "text or a list of texts"),
}


class BatchReport(NamedTuple):
    """The number of answers in the file, and how many of them are errors."""

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
    """Answer every prompt of a file that has no answer yet or was changed after it failed, and count the answers.

    request_of   makes a request from the checked fields of a line; if it raises LoopformerError, that is the answer
    settings     everything else that affects the answers, as plain JSON keyed by option
    report       is called with the number of answered prompts and the number of all prompts
    """
    if source.is_fifo() or source.is_char_device():
        raise FileProblem(f"Prompts are read twice, and {source} cannot be read twice; write them to a file first.")
    if out.exists() and source.exists() and out.samefile(source):
        raise FileProblem(f"{out} is the file of prompts itself; give another --out.")
    with _open_prompts(source) as lines:
        with open_exclusive(out):
            try:
                record, mended = _check_resumable(source, out, json.loads(json.dumps(settings)))
            except LoopformerError:
                raise
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise FileProblem(f"{_record_path(out)} is damaged; {_other_out(out)}") from error
            if mended:
                _answer_mended(source, out, engine, request_of, mended)
        with open_exclusive(out) as file:  # opened again, because mended answers come with a new file
            prompts, total = _read_prompts(lines), record["input"]["lines"]
            done, failed, end = _skip_answered(source, out, prompts)
            with explain_write_errors(out):
                file.truncate(end)  # drop an answer that was cut off
            report(done, total)
            try:
                for answer in _answer_in_order(engine, request_of, prompts):
                    append_line(file, out, _to_line(answer))
                    done += 1
                    if "error" in answer:
                        failed.add(done)
                    report(done, max(done, total))
            finally:
                _record_failed(source, out, record, failed)
    if done < total:
        raise FileProblem(f"{source} was shortened during the run; {done} of its {total} prompts are answered.")
    return BatchReport(done, len(failed))


def _answer_mended(
    source: Path,
    out: Path,
    engine: Engine,
    request_of: Callable[[dict[str, Any]], Request],
    mended: Collection[int],
) -> None:
    """Replace the answers to these prompts, counted from 1, by new ones. The other answers stay."""

    def prompts_and_answers(lines: Iterable[bytes]) -> Iterator[_Prompt | AnswerLine]:
        answered = _answered_prompts(source, out, _read_prompts(lines), mended)
        for number, (prompt, answer, _) in enumerate(answered, 1):
            yield prompt if number in mended else answer

    with _open_prompts(source) as lines, open_atomic(out) as file:
        for answer in _answer_in_order(engine, request_of, prompts_and_answers(lines)):
            file.write(_to_line(answer))


def _to_line(answer: AnswerLine) -> bytes:
    # An id may hold half a surrogate pair, which UTF-8 cannot encode: it becomes its JSON escape.
    return (json.dumps(answer, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def _open_prompts(source: Path) -> IO[bytes]:
    try:
        return source.open("rb")
    except OSError as error:
        raise unreadable(source, error) from error


# Reading prompts.


class _Prompt(NamedTuple):
    """The id of an input line, with its fields or the error that makes it invalid."""

    id: Any
    fields: dict[str, Any] | LoopformerError


def _read_prompts(lines: Iterable[bytes]) -> Iterator[_Prompt]:
    """The prompts of all lines that are not blank. A line without an id gets its line number."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt_id: Any = number
        fields: dict[str, Any] | LoopformerError
        try:
            record = json.loads(line)
            json.dumps(record, allow_nan=False)  # Python also reads NaN and 1e999, which an answer could not repeat
            if not isinstance(record, dict):
                raise LoopformerError('The line must be an object such as {"prompt": "…"}.')
            fields = {key: value for key, value in record.items() if value is not None}
            prompt_id = fields.pop("id", number)
            _check_fields(fields)
        except LoopformerError as error:
            fields = error
        except (ValueError, RecursionError):  # a wrong encoding is a ValueError
            fields = LoopformerError('The line is not JSON; write an object such as {"prompt": "…"}.')
        yield _Prompt(prompt_id, fields)


def _check_fields(fields: dict[str, Any]) -> None:
    """Raise for unknown fields and wrong types. Ranges are checked when the request is made."""
    for name, value in fields.items():
        if name in REMOVED:
            raise LoopformerError(REMOVED[name])
        if name not in _FIELDS:
            raise LoopformerError(f"Unknown field {name}; {nearest(name, [*_FIELDS, 'id'])}")
        types, expected = _FIELDS[name]
        if isinstance(value, bool) or not isinstance(value, types):
            raise LoopformerError(f"{name} must be {expected}, got {value!r}.")
    if "prompt" not in fields:
        raise LoopformerError("The line has no prompt; add one.")


# Answering, in the order of the prompts.


def _answer_in_order(
    engine: Engine, request_of: Callable[[dict[str, Any]], Request], prompts: Iterator[_Prompt | AnswerLine]
) -> Iterator[AnswerLine]:
    """The answers in the order of the prompts. The engine's queue is filled before every step.

    An answer among the prompts is passed on in its turn.
    """
    pending: deque[AnswerLine] = deque()  # in the order of the prompts; has only an id until it is answered
    by_ticket: dict[int, AnswerLine] = {}
    more = True
    while more or pending:
        while more and engine.room and len(pending) < MAX_PENDING:
            prompt = next(prompts, None)
            if prompt is None:
                more = False
                break
            if isinstance(prompt, dict):
                pending.append(prompt)
                continue
            answer: AnswerLine = {"id": prompt.id}
            pending.append(answer)
            try:
                if isinstance(prompt.fields, LoopformerError):
                    raise prompt.fields
                by_ticket[engine.submit(request_of(prompt.fields))] = answer
            except LoopformerError as error:
                answer["error"] = str(error)
        if by_ticket:
            for event in _step_with_retry(engine):
                result = event.result
                if result is None:
                    continue
                by_ticket.pop(event.ticket).update(
                    {
                        "text": result.text,
                        "reason": result.reason,
                        "trajectory": str(result.trajectory),
                        "prompt_tokens": result.prompt_tokens,
                        "new_tokens": len(result.ids),
                    }
                    if result.error is None
                    else {"error": result.error}
                )
        while pending and len(pending[0]) > 1:  # answered: it has more than an id
            yield pending.popleft()


def _step_with_retry(engine: Engine) -> list[Event]:
    """The events of a step. A failed step is retried until two failures in a row end no request."""
    unfinished = -1  # no number of requests
    while True:
        try:
            return engine.step()
        except Exception as error:
            before, unfinished = unfinished, engine.waiting + engine.running
            if unfinished == before:
                reason = " ".join(str(error).split()) or type(error).__name__
                raise RunFailed(
                    f"The engine failed twice in a row ({reason}); finished answers are kept, so free some memory "
                    "or lower --rows, and run the same command again."
                ) from error


# Resuming an earlier file of answers.


def _record_path(out: Path) -> Path:
    return out.with_name(out.name + ".run.json")


def _check_resumable(source: Path, out: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], set[int]]:
    """The record of this run, and which prompts were changed after they had failed.

    Raises if the existing answers belong to other prompts or settings.
    """
    path = _record_path(out)
    is_resumed = out.stat().st_size > 0
    if is_resumed and not path.exists():
        raise FileProblem(f"{out} exists without {path.name}, so it may not hold answers; {_other_out(out)}")
    before: dict[str, Any] = read_json(path) if is_resumed else {"input": {"lines": 0}}
    if is_resumed and before.get("version") != VERSION:
        raise FileProblem(f"{out} was begun by another version of loopformer; {_other_out(out)}")
    failed: dict[str, str] = before["input"].get("failed", {})  # earlier versions did not record them
    mended = set[int]()
    if is_resumed:
        earlier = before["settings"]
        changed = [name for name in {**settings, **earlier} if settings.get(name) != earlier.get(name)]
        if "weights" in changed or "tokenizer" in changed:
            raise FileProblem(f"{out} was begun with another model; {_other_out(out)}")
        if changed:
            raise FileProblem(f"{out} was begun with other options ({', '.join(changed)}); {_other_out(out)}")
        now = _describe_prompts(source, failed, before["input"]["lines"])
        if any(now[name] != before["input"][name] for name in ("lines", "sha256")):
            raise FileProblem(f"{out} holds answers to other prompts than {source}; {_other_out(out)}")
        mended = {int(number) for number in failed if now["failed"][number] != failed[number]}
    # The hashes of mended prompts stay those of the old lines until the new answers are written.
    after = {
        "version": VERSION,
        "settings": settings,
        "input": {**_describe_prompts(source, failed), "failed": failed},
    }
    if after != before:
        write_json(path, after)
    return after, mended


def _record_failed(source: Path, out: Path, record: dict[str, Any], failed: Collection[int]) -> None:
    """Record which prompts failed, so that they may be changed before the next run."""
    begun = record["input"]
    if not failed and not begun["failed"]:
        return
    now = _describe_prompts(source, begun["failed"])
    # Lines that were changed during the run may differ from what was answered, so the next run must see the change.
    if all(now[name] == begun[name] for name in ("lines", "sha256")):
        described = _describe_prompts(source, {str(number) for number in failed})
        if described != begun:
            write_json(_record_path(out), {**record, "input": described})


def _other_out(out: Path) -> str:
    return f"give another --out, or remove {out} to start over."


def _describe_prompts(source: Path, failed: Collection[str], first: int | None = None) -> dict[str, Any]:
    """The number of lines that are not blank, a hash of those that did not fail, and hashes of those that did.

    `failed` holds their numbers, counted from 1. Only the `first` lines are described, or all of them.
    """
    count, digest = 0, hashlib.sha256()
    hashes: dict[str, str] = {}
    with _open_prompts(source) as lines:
        for line in islice(filter(bytes.strip, lines), first):
            count += 1
            content = line.rstrip(b"\r\n") + b"\n"
            if str(count) in failed:
                hashes[str(count)] = hashlib.sha256(content).hexdigest()[:16]
            else:
                digest.update(content)
    return {"lines": count, "sha256": digest.hexdigest(), "failed": hashes}


def _skip_answered(source: Path, out: Path, prompts: Iterator[_Prompt]) -> tuple[int, set[int], int]:
    """Advance `prompts` past those with answers.

    Returns the number of answers, which of them are errors, counted from 1, and the bytes of all.
    """
    count, failed, end = 0, set[int](), 0
    for _, answer, size in _answered_prompts(source, out, prompts):
        count, end = count + 1, end + size
        if "error" in answer:
            failed.add(count)
    return count, failed, end


def _answered_prompts(
    source: Path, out: Path, prompts: Iterator[_Prompt], mended: Collection[int] = ()
) -> Iterator[tuple[_Prompt, AnswerLine, int]]:
    """The prompts that have an answer, with the answer and the bytes of its line.

    Raises if an answer has another id than its prompt, except for mended prompts, counted from 1. A last line
    without a newline was cut off by an interruption and is left out.
    """
    with out.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                answer = json.loads(line)
            except (ValueError, RecursionError):
                answer = None
            prompt = next(prompts, None)
            if (
                prompt is None
                or not isinstance(answer, dict)
                or (answer.get("id") != prompt.id and number not in mended)
            ):
                raise FileProblem(
                    f"Line {number} of {out} does not answer its prompt in {source}; {_other_out(out)}"
                )
            yield prompt, answer, len(line)
