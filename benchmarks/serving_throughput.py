"""What a server costs: its throughput over that of its engine, on one device.

    python benchmarks/serving_throughput.py [--model paper/loopformer-3x8] [--loads full,mixed] [--seconds 2]
                                            [--rounds 3] [--parts engine,server,stream,transformers]
                                            [--temperature 0] [--out FILE]

engine        the engine alone in this process, as the server makes it; text and stop strings included
server        `loopformer serve` on loopback, a client for each row, whole answers; aimed at: 0.85 of the engine
stream        the same with server-sent events; aimed at: 0.6
transformers  Transformers' continuous batching of a GPT-2 of the same compute (k·L blocks), without making text

All run the same requests: random prompts of 64 to 256 tokens, 64 to 192 new ones, greedy unless there is a
temperature (which Transformers is not given), a stop string. There are
as many clients as rows; each sends its next request when it has its answer. Loads: `full` has all requests at the
largest budget, `mixed` has a third each at L, L/2 and L/4; Transformers has one depth and so the full load alone.
After rounds that warm up through the same paths, tokens are counted for `--seconds` while all rows are busy.
Engine, server and streams take turns, `--rounds` times: what a host can do changes within seconds, so a share is of
the engine as it was beside it. Shares of single rounds are kept, too.

A preset gets random weights (seed 0) and a vocabulary of words of its size; `box` is the model in the box. The
clients have processes of their own (http_clients.py), whose CPU seconds, of all their time, stand beside those of
the server and its engine, of the seconds that count. Times to the first token are those of requests sent while
tokens were counted, times to the last those of requests that ended then. The last line is JSON.
"""

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from serve_process import ServeProcess

from loopformer.benchmark.decode import STOPS, gpt2
from loopformer.benchmark.machine import describe, free_memory, publish
from loopformer.config import load_run, preset_names, with_expected_vocab
from loopformer.config.model import BOX
from loopformer.data.tokenizer import Tokenizer
from loopformer.device import choose_device, synchronise
from loopformer.inference.engine import Engine
from loopformer.inference.request import Request
from loopformer.inference.sampling import Sampling
from loopformer.lm import LM
from loopformer.loading.folder import located, save_model
from loopformer.model import LoopedLM
from loopformer.serving.worker import WorkerSettings, load_served
from loopformer.trajectory import Trajectory

Report = dict[str, Any]
PARTS = ("engine", "server", "stream", "transformers")
PROMPT, NEW = (64, 256), (64, 192)  # tokens of a request, from and to
EACH = 48  # requests of a client, which begin again then
RAMP = 1.0  # seconds until all rows are busy and their ends have spread
WARM, ROUNDS, ALIKE = 1.0, 8, 0.15  # seconds of a round that warms up, how many at most, until two are so alike
CLIENTS = Path(__file__).with_name("http_clients.py")


class Asked(NamedTuple):
    """A request as plain data."""

    prompt: list[int]
    budget: int
    tokens: int
    temperature: float

    def body(self, stream: bool) -> Report:
        body = {
            "prompt": self.prompt,
            "budget": self.budget,
            "max_tokens": self.tokens,
            "temperature": self.temperature,
        }
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return {**body, "stop": list(STOPS), **options}

    def request(self) -> Request:
        trajectory, sampling = Trajectory.uniform(self.budget), Sampling(self.temperature)
        return Request(tuple(self.prompt), trajectory, sampling, self.tokens, STOPS)


class Times(NamedTuple):
    """When a request was sent, and its first and last token came."""

    sent: float
    first: float
    last: float


class Window(NamedTuple):
    """What was counted between two times: tokens, requests, CPU seconds by process."""

    since: float
    until: float
    tokens: float
    times: Sequence[Times]
    cpu: dict[str, float]
    events: tuple[int, int] = (0, 0)  # tokens of streams, and events that brought them

    @property
    def rate(self) -> float:
        return self.tokens / (self.until - self.since)


def draw(vocab: int, budgets: Sequence[int], clients: int, temperature: float, seed: int) -> list[list[Asked]]:
    """What each client asks for, in its order."""
    rng = random.Random(seed)

    def one(number: int) -> Asked:
        prompt = rng.choices(range(1, vocab), k=rng.randint(*PROMPT))  # 0 ends a text
        return Asked(prompt, budgets[number % len(budgets)], rng.randint(*NEW), temperature)

    return [[one(client + number) for number in range(EACH)] for client in range(clients)]


def summary(windows: Sequence[Window], engine: Sequence[Window] = ()) -> Report:
    """Tokens a second, the share of an engine's beside them, and the milliseconds of requests that were sent, or
    ended, meanwhile."""

    def percentiles(values: Sequence[float]) -> Report:
        ordered = sorted(1e3 * value for value in values)
        return {f"p{p}": round(ordered[p * (len(ordered) - 1) // 100], 2) for p in (50, 95)} if ordered else {}

    sent = [one for each in windows for one in each.times if each.since <= one.sent < each.until]
    ended = [one for each in windows for one in each.times if each.since <= one.last < each.until]
    tokens, seconds = sum(one.tokens for one in windows), sum(one.until - one.since for one in windows)
    shares = [one.rate / other.rate for one, other in zip(windows, engine, strict=False)]
    report: Report = {
        "tokens_per_second": tokens / seconds,
        "tokens": tokens,
        "seconds": seconds,
        "share": statistics.median(shares) if shares else None,
        "shares": shares,
        "ended": len(ended),
        "first_token_ms": percentiles([one.first - one.sent for one in sent]),
        "whole_ms": percentiles([one.last - one.sent for one in ended]),
        "cpu_seconds": {name: sum(one.cpu[name] for one in windows) for name in windows[0].cpu},
    }
    if "server" in windows[0].cpu:
        report["server_us_per_token"] = 1e6 * report["cpu_seconds"]["server"] / max(1, tokens)
    if events := sum(one.events[1] for one in windows):
        report["tokens_per_event"] = sum(one.events[0] for one in windows) / events
    return report


def settle(measure: Callable[[], Window]) -> None:
    """Run rounds that do not count until two are alike: kernels are compiled and graphs recorded at first use."""
    before = 0.0
    for _ in range(ROUNDS):
        rate = measure().rate
        if abs(rate - before) <= ALIKE * rate:
            return
        before = rate


# The model.


def prepare(name: str, folder: Path, device: torch.device) -> str:
    """The model's place: a preset with random weights is written into the folder, with a tokenizer."""
    if name not in preset_names():
        return name
    torch.manual_seed(0)
    with device:
        model = LoopedLM(with_expected_vocab(*load_run(name)).model)
    place = folder / name.replace("/", "-")
    save_model(model.to(torch.bfloat16), place)
    vocabulary(model.config.vocab).save(place)
    return str(place)


def vocabulary(size: int) -> Tokenizer:
    """The tokenizer in the box with more words, each made of two of its own."""
    content = json.loads((located(BOX) / "tokenizer.json").read_text(encoding="utf-8"))
    known = content["model"]["vocab"]
    words = [word for word in known if word.isascii() and word.isalpha()]
    for first in words:
        for second in words:
            if len(known) == size:
                return Tokenizer(json.dumps(content))
            known.setdefault(first + second, len(known))
    raise SystemExit(f"There are no words for a vocabulary of {size}; {len(known)} at least.")


# The engine.


def drive(engine: Engine, asked: Sequence[Sequence[Asked]], seconds: float) -> Window:
    """Clients in this process: each submits its next request when its last has ended."""
    clients = [iter(list(each) * 100) for each in asked]
    owners = {engine.submit(next(client).request()): client for client in clients}
    sent, first, times = dict.fromkeys(owners, time.monotonic()), dict[int, float](), list[Times]()
    since = time.monotonic() + RAMP
    before: tuple[float, int, float] | None = None
    while before is None or time.monotonic() < before[0] + seconds:
        if before is None and time.monotonic() >= since:
            before = time.monotonic(), engine.counts.new_tokens, time.process_time()
        for event in engine.step():
            now = time.monotonic()
            first.setdefault(event.ticket, now)
            if event.result is not None:
                times.append(Times(sent.pop(event.ticket), first.pop(event.ticket), now))
                client = owners.pop(event.ticket)
                ticket = engine.submit(next(client).request())
                owners[ticket], sent[ticket] = client, now
    after = time.monotonic(), engine.counts.new_tokens, time.process_time()
    for ticket in owners:
        engine.cancel(ticket)
    list(engine.run())
    return Window(before[0], after[0], after[1] - before[1], times, {"engine": after[2] - before[2]})


# The server.


class Server(ServeProcess):
    """With a row for each client."""

    def __init__(self, settings: WorkerSettings) -> None:
        rows = str(settings.rows)
        super().__init__(settings.model, "--rows", rows, "--queue", rows, "--device", settings.device)

    def counts(self) -> tuple[float, float, float, float]:
        """The time, all tokens so far, and the CPU seconds of both processes."""
        tokens = self.metric("generation_tokens_total")
        return time.monotonic(), tokens, cpu_seconds(self.process.pid), cpu_seconds(self.engine)

    def measure(self, stream: bool, processes: int, asked: Sequence[Sequence[Asked]], seconds: float) -> Window:
        """Tokens that the server gives out while all clients are there, and their own times."""
        until = time.monotonic() + RAMP + seconds + 0.5
        clients = []
        for number in range(processes):
            bodies = [[one.body(stream) for one in each] for each in asked[number::processes]]
            task = json.dumps({"port": urlsplit(self.url).port, "until": until, "bodies": bodies})
            client = subprocess.Popen(
                [sys.executable, str(CLIENTS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert client.stdin is not None
            client.stdin.write(task)
            client.stdin.close()
            client.stdin = None
            clients.append(client)
        time.sleep(max(0.0, until - seconds - 0.25 - time.monotonic()))
        before = self.counts()
        time.sleep(seconds)
        after = self.counts()
        said = [json.loads(client.communicate()[0]) for client in clients]
        self.settle()
        failures = [failure for each in said for failure in each["failures"]]
        if failures:
            raise SystemExit(f"{len(failures)} requests failed: {failures[0]}")
        _, tokens, front, engine = (now - then for now, then in zip(after, before, strict=True))
        cpu = {"server": front, "engine": engine, "clients": sum(each["cpu"] for each in said)}
        answers = [answer for each in said for answer in each["answers"]]
        events = (sum(answer[3] for answer in answers), sum(answer[4] for answer in answers)) if stream else (0, 0)
        return Window(before[0], after[0], tokens, [Times(*answer[:3]) for answer in answers], cpu, events)


def cpu_seconds(process: int) -> float:
    """User and system time of all threads of a process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# Transformers.


def transformers_rate(lm: LM, asked: Sequence[Sequence[Asked]], seconds: float) -> Report:
    """The same requests through Transformers' continuous batching; when each token came is what it says itself."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config, weight = lm.model.config, lm.model.tokens.weight
    model = gpt2(config, config.loops, weight)
    if find_spec("flash_attn") is None and find_spec("flash_attn_interface") is None:
        model.set_attn_implementation("paged|sdpa")  # else it may look for kernels on the Hub
    rows, blocks = len(asked), -(-(PROMPT[1] + NEW[1]) // 256) + 1
    batching = ContinuousBatchingConfig(
        num_blocks=rows * blocks, max_batch_tokens=2048, max_requests_per_batch=rows, allow_block_sharing=False
    )
    generation = GenerationConfig(do_sample=False, max_new_tokens=NEW[1], eos_token_id=-1, pad_token_id=0)
    outputs: list[Any] = []
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching
    ) as manager:
        clients = {str(number): iter(list(each) * 100) for number, each in enumerate(asked)}

        def ask(client: str, most: int = NEW[1]) -> None:
            one = next(clients[client])
            name = f"{client} {len(outputs)} {time.monotonic()}"
            manager.add_request(one.prompt, name, min(most, one.tokens), record_timestamps=True)

        def run(until: float, most: int = NEW[1]) -> None:
            """Keep all clients at it until then, and let them end."""
            for client in clients:
                ask(client, most)
            going = len(clients)
            while going:
                output = manager.get_result(timeout=60)
                if output is None or output.error:
                    raise SystemExit(f"Transformers failed: {output and output.error}")
                outputs.append(output)
                going -= 1
                if time.monotonic() < until:
                    ask(output.request_id.split()[0], most)
                    going += 1

        run(time.monotonic() + 2 * WARM, most=16)
        outputs.clear()
        since, cpu = time.monotonic() + RAMP, time.process_time()
        until, began = since + seconds, time.monotonic()
        run(until)
        share = seconds / (time.monotonic() - began)
        cpu = share * (time.process_time() - cpu)
        implementation = model.config._attn_implementation
    tokens = sum(since <= when < until for output in outputs for when in output.timestamps)
    times = [Times(output.created_time, output.timestamps[0], output.timestamps[-1]) for output in outputs]
    return {**summary([Window(since, until, tokens, times, {"engine": cpu})]), "attention": implementation}


# All of it.


def line(part: str, load: str, row: Report) -> str:
    words = [f"{part:12} {load:5} {row['tokens_per_second']:9,.0f} tokens/s"]
    if row["share"] is not None:
        words.append(f"{row['share']:.2f} of the engine ({min(row['shares']):.2f} to {max(row['shares']):.2f})")
    for name, label in (("first_token_ms", "first token"), ("whole_ms", "whole")):
        if row[name]:
            words.append(f"{label} {row[name]['p50']:.0f} ms (p95 {row[name]['p95']:.0f})")
    words.append("CPU s " + ", ".join(f"{name} {value:.1f}" for name, value in row["cpu_seconds"].items()))
    return ", ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="paper/loopformer-3x8", help="a preset, a model folder or box")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--loads", default="full,mixed")
    parser.add_argument("--rows", type=int, default=64, help="of the engine, and clients")
    parser.add_argument("--seconds", type=float, default=2.0, help="that tokens are counted, of each part and load")
    parser.add_argument("--rounds", type=int, default=3, help="of all parts")
    parser.add_argument(
        "--processes", type=int, default=max(1, min(4, (os.cpu_count() or 1) // 3)), help="of clients"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="of the texts; 0: the most likely tokens")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    parts, names = asked.parts.split(","), asked.loads.split(",")
    if unknown := set(parts) - set(PARTS) or set(names) - {"full", "mixed"}:
        parser.error(f"there is no {', '.join(sorted(unknown))}")

    began = time.monotonic()
    rows: list[Report] = []

    def note(part: str, load: str, found: Report) -> None:
        if part == "server":
            found["first_token_ms"] = None  # nobody sees it
        rows.append({"part": part, "load": load, **found})
        print(line(part, load, rows[-1]), flush=True)

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s: {what}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        place = prepare(asked.model, Path(folder), choose_device(asked.device))
        settings = WorkerSettings(place, asked.rows, device=asked.device)
        lm, _ = load_served(settings)
        config, device = lm.model.config, lm.model.device
        say(f"the model is there, {lm.model.dtype_name} on {device}")
        loops = config.loops
        budgets = {"full": [loops], "mixed": sorted({loops, max(1, loops // 2), max(1, loops // 4)})}
        loads = {name: draw(config.vocab, budgets[name], asked.rows, asked.temperature, 0) for name in names}
        warmest = budgets["mixed" if "mixed" in names else "full"]
        warm = draw(config.vocab, warmest, asked.rows, asked.temperature, 1)
        report: Report = {
            "benchmark": "serving_throughput",
            "command": shlex.join(["python", *sys.argv]),
            "seed": 0,
            **describe(device),
            "cores": os.cpu_count(),
            "dtype": lm.model.dtype_name,
            "model": asked.model,
            "rows": asked.rows,
            "prompt_tokens": PROMPT,
            "new_tokens": NEW,
            "client_processes": asked.processes,
            "rounds": asked.rounds,
            "temperature": asked.temperature,
        }
        try:
            with ExitStack() as stack:
                measures: dict[str, Callable[[Sequence[Sequence[Asked]], float], Window]] = {}
                if "engine" in parts:
                    measures["engine"] = partial(drive, lm.engine(asked.rows, queue=asked.rows))
                if "server" in parts or "stream" in parts:
                    say("the server starts")
                    server = stack.enter_context(Server(settings))
                    say("the server is ready")
                    measures |= {
                        part: partial(server.measure, part == "stream", asked.processes)
                        for part in ("server", "stream")
                        if part in parts
                    }
                for part, measure in measures.items():
                    settle(partial(measure, warm, WARM))
                    say(f"{part}: warm")
                for name, requests in loads.items():
                    found: dict[str, list[Window]] = {part: [] for part in measures}
                    for _ in range(asked.rounds):
                        for part, measure in measures.items():
                            found[part].append(measure(requests, asked.seconds))
                    for part, windows in found.items():
                        note(part, name, summary(windows, found.get("engine", ())))
            measures.clear()
            synchronise(device)
            free_memory(device)
            if "transformers" in parts and "full" in loads:
                say("Transformers starts")
                note("transformers", "full", transformers_rate(lm, loads["full"], asked.seconds))
        finally:  # what was measured stays measured
            publish({**report, "total_seconds": time.monotonic() - began, "measured": rows}, asked.out)


if __name__ == "__main__":
    main()
