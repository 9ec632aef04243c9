"""What a server costs: its throughput over that of its engine, on one device.

    python benchmarks/serving_throughput.py [--model paper/loopformer-3x8] [--loads full,mixed] [--seconds 2]
                                            [--rounds 3] [--parts engine,server,stream,transformers]
                                            [--temperature 0] [--out FILE]

engine        the engine in this process, set up as the server does it, with text and stop strings
server        `loopformer serve` on loopback, a client for each row, complete answers; goal: 0.85 of the engine
stream        the same with server-sent events; goal: 0.6
transformers  Transformers' continuous batching of a GPT-2 of the same compute (k·L blocks), without making text

All parts run the same requests: random prompts of 64 to 256 tokens, 64 to 192 new tokens, a stop string, greedy
unless `--temperature` is set (Transformers always decodes greedily). There are as many clients as rows, and each
sends its next request when it has its answer. The load `full` has all requests at the largest budget, `mixed` a
third each at L, L/2 and L/4. Transformers has one depth and so runs `full` alone.

After warm-up rounds on the same paths, tokens are counted for `--seconds` while all rows are busy. The speed of a
host changes within seconds. So engine, server and streams take turns, `--rounds` times, and a share compares a part
with the engine of the same round.

A preset gets random weights (seed 0) and a vocabulary of its size; `box` is the model in the box. The clients run
in processes of their own (http_clients.py). Their CPU seconds cover their life, those of the server and its engine
only the counted seconds. Times to the first token are of requests sent while tokens were counted, times to the
last of requests that ended then. The last line is JSON.
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
from publish import publish
from serve_process import ServeProcess

from loopformer.benchmark.decode import STOPS
from loopformer.benchmark.machine import describe, free_memory, gpt2
from loopformer.config import load_run, preset_names, with_expected_vocab
from loopformer.config.model import BOX
from loopformer.data.tokenizer import Tokenizer
from loopformer.device import choose_device, synchronise
from loopformer.inference.engine import Engine
from loopformer.inference.request import Request, Sampling
from loopformer.lm import LM
from loopformer.loading.folder import resolve_model_path, save_model
from loopformer.model import LoopedLM
from loopformer.serving.messages import WorkerSettings
from loopformer.serving.worker import load_served
from loopformer.trajectory import Trajectory

Report = dict[str, Any]
PARTS = ("engine", "server", "stream", "transformers")
PROMPT, NEW = (64, 256), (64, 192)  # tokens of a request, from and to
EACH = 48  # requests of a client, repeated when they run out
RAMP = 1.0  # seconds until all rows are busy and no longer end together
WARM, MAX_WARM_ROUNDS, ALIKE = 1.0, 8, 0.15  # warm-up rounds: seconds, most, and the difference at which they end
CLIENTS = Path(__file__).with_name("http_clients.py")


class ClientRequest(NamedTuple):
    """A request, for the server and for the engine."""

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


Queues = Sequence[Sequence[ClientRequest]]  # the requests of each client, in its order


class Times(NamedTuple):
    """When a request was sent, and when its first and last token came."""

    sent: float
    first: float
    last: float


class Window(NamedTuple):
    """Tokens, requests and CPU seconds by process, counted between two times."""

    since: float
    until: float
    tokens: float
    times: Sequence[Times]
    cpu: dict[str, float]
    events: tuple[int, int] = (0, 0)  # tokens of streams, and the events that carried them

    @property
    def rate(self) -> float:
        return self.tokens / (self.until - self.since)


def draw_requests(
    vocab: int, budgets: Sequence[int], clients: int, temperature: float, seed: int
) -> list[list[ClientRequest]]:
    """The requests of each client, in its order."""
    rng = random.Random(seed)

    def draw_request(number: int) -> ClientRequest:
        prompt = rng.choices(range(1, vocab), k=rng.randint(*PROMPT))  # 0 ends a text
        return ClientRequest(prompt, budgets[number % len(budgets)], rng.randint(*NEW), temperature)

    return [[draw_request(client + number) for number in range(EACH)] for client in range(clients)]


def summary(windows: Sequence[Window], engine: Sequence[Window] = ()) -> Report:
    """Rate, share of the engine's rate in the same rounds, and times of the requests sent or ended meanwhile."""

    def percentiles(values: Sequence[float]) -> Report:
        ordered = sorted(1e3 * value for value in values)
        return {f"p{p}": round(ordered[p * (len(ordered) - 1) // 100], 2) for p in (50, 95)} if ordered else {}

    requests = [(window, times) for window in windows for times in window.times]
    sent = [times for window, times in requests if window.since <= times.sent < window.until]
    ended = [times for window, times in requests if window.since <= times.last < window.until]
    tokens = sum(window.tokens for window in windows)
    seconds = sum(window.until - window.since for window in windows)
    shares = [window.rate / other.rate for window, other in zip(windows, engine, strict=False)]
    report: Report = {
        "tokens_per_second": tokens / seconds,
        "tokens": tokens,
        "seconds": seconds,
        "share": statistics.median(shares) if shares else None,
        "shares": shares,
        "ended": len(ended),
        "first_token_ms": percentiles([times.first - times.sent for times in sent]),
        "whole_ms": percentiles([times.last - times.sent for times in ended]),
        "cpu_seconds": {name: sum(window.cpu[name] for window in windows) for name in windows[0].cpu},
    }
    if "server" in windows[0].cpu:
        report["server_us_per_token"] = 1e6 * report["cpu_seconds"]["server"] / max(1, tokens)
    if events := sum(window.events[1] for window in windows):
        report["tokens_per_event"] = sum(window.events[0] for window in windows) / events
    return report


def settle(measure: Callable[[], Window]) -> None:
    """Warm up until two rounds are alike: kernels are compiled and graphs captured at first use."""
    before = 0.0
    for _ in range(MAX_WARM_ROUNDS):
        rate = measure().rate
        if abs(rate - before) <= ALIKE * rate:
            return
        before = rate


# The model.


def prepare(name: str, folder: Path, device: torch.device) -> str:
    """The path of the model. A preset is written into the folder, with random weights and a tokenizer."""
    if name not in preset_names():
        return name
    torch.manual_seed(0)
    with device:
        model = LoopedLM(with_expected_vocab(*load_run(name)).model)
    model_path = folder / name.replace("/", "-")
    save_model(model.to(torch.bfloat16), model_path)
    vocabulary(model.config.vocab).save(model_path)
    return str(model_path)


def vocabulary(size: int) -> Tokenizer:
    """The tokenizer of the box, filled up to this size with pairs of its words."""
    content = json.loads((resolve_model_path(BOX) / "tokenizer.json").read_text(encoding="utf-8"))
    known = content["model"]["vocab"]
    words = [word for word in known if word.isascii() and word.isalpha()]
    for first in words:
        for second in words:
            if len(known) == size:
                return Tokenizer(json.dumps(content))
            known.setdefault(first + second, len(known))
    raise SystemExit(f"There are no words for a vocabulary of {size}; {len(known)} at least.")


# The engine.


def drive(engine: Engine, queues: Queues, seconds: float) -> Window:
    """Measure the engine. Each client submits its next request when its last has ended."""
    clients = [iter(list(queue) * 100) for queue in queues]
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
    """A server with a row for each client."""

    def __init__(self, settings: WorkerSettings) -> None:
        rows = str(settings.rows)
        super().__init__(settings.model, "--rows", rows, "--queue", rows, "--device", settings.device)

    def counts(self) -> tuple[float, float, float, float]:
        """The time, the tokens so far, and the CPU seconds of both processes."""
        tokens = self.metric("generation_tokens_total")
        return time.monotonic(), tokens, cpu_seconds(self.process.pid), cpu_seconds(self.engine)

    def measure(self, stream: bool, processes: int, queues: Queues, seconds: float) -> Window:
        """Count the tokens that the server generates while all clients are busy, and time the requests."""
        until = time.monotonic() + RAMP + seconds + 0.5
        clients = []
        for number in range(processes):
            bodies = [[request.body(stream) for request in queue] for queue in queues[number::processes]]
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
        outputs = [json.loads(client.communicate()[0]) for client in clients]
        self.settle()
        failures = [failure for output in outputs for failure in output["failures"]]
        if failures:
            raise SystemExit(f"{len(failures)} requests failed: {failures[0]}")
        _, tokens, front, engine = (now - then for now, then in zip(after, before, strict=True))
        cpu = {"server": front, "engine": engine, "clients": sum(output["cpu"] for output in outputs)}
        answers = [answer for output in outputs for answer in output["answers"]]
        events = (sum(answer[3] for answer in answers), sum(answer[4] for answer in answers)) if stream else (0, 0)
        return Window(before[0], after[0], tokens, [Times(*answer[:3]) for answer in answers], cpu, events)


def cpu_seconds(process: int) -> float:
    """User and system time of all threads of a process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# Transformers.


def transformers_rate(lm: LM, queues: Queues, seconds: float) -> Report:
    """Run the same requests through Transformers' continuous batching, which times each token itself."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config, weight = lm.model.config, lm.model.tokens.weight
    model = gpt2(config, config.loops, weight)
    if find_spec("flash_attn") is None and find_spec("flash_attn_interface") is None:
        model.set_attn_implementation("paged|sdpa")  # else it may look for kernels on the Hub
    rows, blocks = len(queues), -(-(PROMPT[1] + NEW[1]) // 256) + 1
    batching = ContinuousBatchingConfig(
        num_blocks=rows * blocks, max_batch_tokens=2048, max_requests_per_batch=rows, allow_block_sharing=False
    )
    generation = GenerationConfig(do_sample=False, max_new_tokens=NEW[1], eos_token_id=-1, pad_token_id=0)
    outputs: list[Any] = []
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching
    ) as manager:
        clients = {str(number): iter(list(queue) * 100) for number, queue in enumerate(queues)}

        def submit(client: str, most: int = NEW[1]) -> None:
            request = next(clients[client])
            name = f"{client} {len(outputs)} {time.monotonic()}"
            manager.add_request(request.prompt, name, min(most, request.tokens), record_timestamps=True)

        def run(until: float, most: int = NEW[1]) -> None:
            """Keep all clients busy until then, and wait for their last requests."""
            for client in clients:
                submit(client, most)
            running = len(clients)
            while running:
                output = manager.get_result(timeout=60)
                if output is None or output.error:
                    raise SystemExit(f"Transformers failed: {output and output.error}")
                outputs.append(output)
                running -= 1
                if time.monotonic() < until:
                    submit(output.request_id.split()[0], most)
                    running += 1

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


# The command line.


def line(part: str, load: str, row: Report) -> str:
    words = [f"{part:12} {load:5} {row['tokens_per_second']:9,.0f} tokens/s"]
    if row["share"] is not None:
        words.append(f"{row['share']:.2f} of the engine ({min(row['shares']):.2f} to {max(row['shares']):.2f})")
    for name, label in (("first_token_ms", "first token"), ("whole_ms", "last token")):
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
    args = parser.parse_args()
    parts, names = args.parts.split(","), args.loads.split(",")
    if unknown := set(parts) - set(PARTS) or set(names) - {"full", "mixed"}:
        parser.error(f"there is no {', '.join(sorted(unknown))}")

    began = time.monotonic()
    rows: list[Report] = []

    def record(part: str, load: str, result: Report) -> None:
        if part == "server":
            result["first_token_ms"] = None  # a complete answer has no first token
        rows.append({"part": part, "load": load, **result})
        print(line(part, load, rows[-1]), flush=True)

    def log(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s: {text}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        model_path = prepare(args.model, Path(folder), choose_device(args.device))
        settings = WorkerSettings(model_path, args.rows, device=args.device)
        lm, _ = load_served(settings)
        config, device = lm.model.config, lm.model.device
        log(f"model loaded, {lm.model.dtype_name} on {device}")
        loops = config.loops
        budgets = {"full": [loops], "mixed": sorted({loops, max(1, loops // 2), max(1, loops // 4)})}
        loads = {
            name: draw_requests(config.vocab, budgets[name], args.rows, args.temperature, seed=0) for name in names
        }
        warmest = budgets["mixed" if "mixed" in names else "full"]
        warm = draw_requests(config.vocab, warmest, args.rows, args.temperature, 1)
        report: Report = {
            "benchmark": "serving_throughput",
            "command": shlex.join(["python", *sys.argv]),
            "seed": 0,
            **describe(device),
            "cores": os.cpu_count(),
            "dtype": lm.model.dtype_name,
            "model": args.model,
            "rows": args.rows,
            "prompt_tokens": PROMPT,
            "new_tokens": NEW,
            "client_processes": args.processes,
            "rounds": args.rounds,
            "temperature": args.temperature,
        }
        try:
            with ExitStack() as stack:
                measures: dict[str, Callable[[Queues, float], Window]] = {}
                if "engine" in parts:
                    measures["engine"] = partial(drive, lm.engine(args.rows, queue=args.rows))
                if "server" in parts or "stream" in parts:
                    log("the server starts")
                    server = stack.enter_context(Server(settings))
                    log("the server is ready")
                    measures |= {
                        part: partial(server.measure, part == "stream", args.processes)
                        for part in ("server", "stream")
                        if part in parts
                    }
                for part, measure in measures.items():
                    settle(partial(measure, warm, WARM))
                    log(f"{part}: warm")
                for name, requests in loads.items():
                    result: dict[str, list[Window]] = {part: [] for part in measures}
                    for _ in range(args.rounds):
                        for part, measure in measures.items():
                            result[part].append(measure(requests, args.seconds))
                    for part, windows in result.items():
                        record(part, name, summary(windows, result.get("engine", ())))
            measures.clear()
            synchronise(device)
            free_memory(device)
            if "transformers" in parts and "full" in loads:
                log("Transformers starts")
                record("transformers", "full", transformers_rate(lm, loads["full"], args.seconds))
        finally:  # an error must not lose what was measured
            publish({**report, "total_seconds": time.monotonic() - began, "measured": rows}, args.out)


if __name__ == "__main__":
    main()
