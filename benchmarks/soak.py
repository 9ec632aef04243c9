"""A server under load, overload, attack and misfortune: does it stay correct and up?

    make soak                                                  # all of it, half an hour on two cores
    python benchmarks/soak.py [load overload ...] [--out results/serving/soak.json]

Every part starts `loopformer serve` with the model in the box on loopback, as a user does.

load        500 requests, 32 at a time, of mixed budgets and lengths, streamed or not, some cancelled half way.
            Nothing fails, every text equals that of a single run, and memory, KV slots and files are freed.
overload    Twice the rate that the server sustains, with and without --degrade: how many requests are refused.
hostile     Malformed and hostile requests (hostile.py): no 500, no hang, and the server still answers.
misfortune  The engine or the server is killed, the time to drain runs out, a second signal comes.
memory      10,000 small requests: the memory of neither process keeps growing.

Ten parts attack beside one ordinary client (attacks.py). It gets its text within 15 s, 99 % of the probes of
/health are answered within 250 ms, and no status is 5xx.

errors      Bodies of up to 1 MiB whose every value is wrong.
priority    Eight clients with the most urgent priority on four rows.
copies      One client that asks for as many texts as it may.
stops       Long stop strings that nearly occur in the text.
forged      Texts with made-up addresses in X-Forwarded-For, on a server without keys.
names       A megabyte of a name or of a value.
lengths     Texts that are far longer than the context.
scores      As many texts to be scored as one client may have.
chunks      Bodies in chunks or segments of a few bytes.
connections More connections than there is room for: idle, with half a head, with half a body.

A part that is not run keeps its earlier result in the file. Broken promises are listed in `broken` (exit code 1).
Times are those of a client on the same machine. On a machine with other work, read ratios and counts only.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from attacks import ATTACKS, withstand
from hostile import attack
from publish import publish
from serve_process import ServeProcess, wait_until

import loopformer
from loopformer.config.model import BOX
from loopformer.loading.folder import HELD_OUT, resolve_model_path

Report = dict[str, Any]
DEPTHS: list[Report] = [{"budget": 1}, {"budget": 2}, {"budget": 4}, {"budget": 8}, {"trajectory": "2-1-2-3"}]
MARGIN = 0.1  # share by which the memory of a process may grow
LONG = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "stream": True}


class Server(ServeProcess):
    """A server of the model in the box, on the CPU."""

    def __init__(self, *options: str) -> None:
        super().__init__("--device", "cpu", *options)

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        return httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits, verify=False)

    def held_resources(self) -> Report:
        """KV usage and the resources of both processes while nothing runs."""
        self.settle()
        usage = self.metric("kv_cache_usage_perc")
        time.sleep(1)  # for connections to close
        return {"kv_usage": usage, "server": process_usage(self.process.pid), "engine": process_usage(self.engine)}


def process_usage(process: int) -> Report:
    """Resident memory, open files and threads of a process."""
    folder = Path(f"/proc/{process}")
    pages = int((folder / "statm").read_text().split()[1])
    names = {"files": "fd", "threads": "task"}
    counts = {name: len(list((folder / entry).iterdir())) for name, entry in names.items()}
    return {"rss_mb": round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1), **counts}


def is_alive(process: int) -> bool:
    with suppress(OSError):
        return bool(Path(f"/proc/{process}/cmdline").read_bytes())
    return False


@dataclass
class Answer:
    """The outcome of a request, and its times in seconds."""

    status: int = 0
    text: str = ""
    tokens: int = 0
    served_with: Report = field(default_factory=dict)
    error: str | None = None  # sent as an event of a stream
    first: float | None = None
    total_seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.status != 200 or self.error is not None


async def ask(client: httpx.AsyncClient, body: Report, cancel_after: int | None = None) -> Answer:
    """Send a request. `cancel_after` counts tokens of a stream, and else twentieths of a second."""
    answer, began = Answer(), time.perf_counter()
    if not body.get("stream"):
        limit = None if cancel_after is None else cancel_after / 20
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                response = await client.post("/v1/completions", json=body)
                answer.status, content = response.status_code, response.json()
                if answer.status == 200:
                    answer.text, answer.tokens = (
                        content["choices"][0]["text"],
                        content["usage"]["completion_tokens"],
                    )
                    answer.served_with = content["loopformer"]
    else:
        options = {"logprobs": 0, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json={**body, **options}) as response:
            answer.status = response.status_code
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                answer.first = answer.first or time.perf_counter() - began
                answer.error = event.get("error", {}).get("code")
                answer.served_with = event.get("loopformer", answer.served_with)
                for choice in event.get("choices", ()):
                    answer.text += choice["text"]
                    answer.tokens += len(choice["logprobs"]["tokens"])
                if cancel_after is not None and answer.tokens >= cancel_after:
                    break
    answer.total_seconds = time.perf_counter() - began
    return answer


def percentiles(values: Sequence[float]) -> Report:
    points = {f"p{p}": round(float(np.percentile(values, p)), 4) for p in (50, 95, 99)} if values else {}
    return {"count": len(values), **points}


# Load.


@dataclass(frozen=True)
class Case:
    body: Report
    cancel_after: int | None

    @property
    def depth(self) -> str:
        return str(self.body.get("trajectory") or self.body["budget"])


def draw_cases(count: int, seed: int) -> list[Case]:
    """Requests with beginnings of held-out texts. Every eighth client leaves half way."""
    rng = random.Random(seed)
    lines = (resolve_model_path(BOX) / HELD_OUT).read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    cases = []
    for number in range(count):
        prompt, tokens = rng.choice(texts)[: rng.choice((10, 40, 150, 600))], rng.randint(2, 64)
        body = {"prompt": prompt, "max_tokens": tokens, "stream": rng.random() < 0.5}
        body |= {"temperature": 0} if number % 4 else {"temperature": 1, "seed": number}
        cancel_after = max(1, tokens // 2) if rng.random() < 1 / 8 else None
        cases.append(Case({**body, **rng.choice(DEPTHS)}, cancel_after))
    return cases


async def run_cases(server: Server, cases: Sequence[Case], at_once: int) -> list[Answer]:
    slots = asyncio.Semaphore(at_once)
    async with server.client() as client:

        async def run(case: Case) -> Answer:
            async with slots:
                return await ask(client, case.body, case.cancel_after)

        return await asyncio.gather(*map(run, cases))


def load(args: argparse.Namespace) -> Report:
    cases = draw_cases(args.requests, args.seed)
    with Server() as server:
        asyncio.run(run_cases(server, draw_cases(args.requests // 4, args.seed + 1), args.at_once))  # warm
        before, began = server.held_resources(), time.perf_counter()
        answers = asyncio.run(run_cases(server, cases, args.at_once))
        seconds = time.perf_counter() - began
        usage = [before, server.held_resources()]
        asyncio.run(run_cases(server, cases, args.at_once))
        usage.append(after := server.held_resources())
        restarts = server.metric("engine_restarts_total")
    lm = loopformer.load(BOX)
    completed = [pair for pair in zip(cases, answers, strict=True) if pair[0].cancel_after is None]
    different = []
    for case, answer in completed:
        body = {key: value for key, value in case.body.items() if key != "stream"}
        alone = lm.generate(body.pop("prompt"), **body)
        if answer.text != alone.text:
            different.append({"body": case.body, "served": answer.text, "alone": alone.text})
    by_depth = {}
    for depth in sorted({case.depth for case, _ in completed}):
        at_depth = [answer for case, answer in completed if case.depth == depth]
        streams = [(answer, answer.first) for answer in at_depth if answer.first is not None]
        texts = [(answer, first) for answer, first in streams if answer.tokens > 1]
        gaps = [(answer.total_seconds - first) / (answer.tokens - 1) for answer, first in texts]
        by_depth[depth] = {
            "first_token_seconds": percentiles([first for _, first in streams]),
            "seconds_per_token": percentiles(gaps),
            "whole_seconds": percentiles([answer.total_seconds for answer in at_depth]),
        }
    failed = [answer for answer in answers if answer.failed and answer.status]  # 0: cancelled before an answer
    # The first time, caches fill and the heap gets its size. What grows when all of it comes again is a leak.
    growth = {name: after[name]["rss_mb"] / usage[1][name]["rss_mb"] - 1 for name in ("server", "engine")}
    leaks = {
        "memory": max(growth.values()) > MARGIN,
        "keys and values": after["kv_usage"] > 0,
        "files": any(after[name]["files"] > before[name]["files"] for name in growth),
    }
    return {
        "requests": len(cases),
        "at_once": args.at_once,
        "left": len(cases) - len(completed),
        "greedy": sum(not case.body["temperature"] for case, _ in completed),
        "seconds": seconds,
        "tokens_per_second": sum(answer.tokens for answer in answers) / seconds,
        "statuses": Counter(answer.status for answer in answers),
        "other_texts": different,
        "held_before_after_and_after_all_of_it_again": usage,
        "margin": MARGIN,
        "larger": growth,
        "by_depth": by_depth,
        "broken": [
            *([f"{len(failed)} requests failed"] if failed else []),
            *([f"{len(different)} texts are not those of single runs"] if different else []),
            *([f"{restarts:g} engines were lost"] if restarts else []),
            *(f"leak of {what}" for what, is_leaking in leaks.items() if is_leaking),
        ],
    }


# Overload.

ROWS, QUEUE = 8, 32
STEADY = 1.33  # a round counts only if the machine's rate changed by less, or the load was not twice its rate


async def send_at_rate(server: Server, rate: float, count: int, seed: int) -> list[Answer]:
    """Send requests of the full budget at random times, whether or not earlier ones have ended."""
    rng, prompts = random.Random(seed), [case.body["prompt"] for case in draw_cases(64, seed)]
    tasks: list[asyncio.Task[Answer]] = []
    async with server.client() as client:
        at = time.perf_counter()
        for _ in range(count):
            at += rng.expovariate(rate)
            await asyncio.sleep(at - time.perf_counter())
            body = {"prompt": rng.choice(prompts), "max_tokens": 32, "temperature": 1, "seed": len(tasks)}
            tasks.append(asyncio.create_task(ask(client, body)))
        return await asyncio.gather(*tasks)


async def sustained_rate(server: Server, seconds: float, seed: int) -> float:
    """Requests finished per second while all slots are busy and some requests wait."""
    rng, prompts = random.Random(seed), [case.body["prompt"] for case in draw_cases(64, seed)]
    done, until = 0, time.perf_counter() + seconds
    async with server.client() as client:

        async def send_requests() -> None:
            nonlocal done
            while time.perf_counter() < until:
                body = {"prompt": rng.choice(prompts), "max_tokens": 32, "temperature": 1}
                await ask(client, body)
                done += time.perf_counter() < until

        await asyncio.gather(*(send_requests() for _ in range(ROWS + QUEUE // 4)))
    return done / seconds


def overload(args: argparse.Namespace) -> Report:
    options = ("--rows", str(ROWS), "--queue", str(QUEUE))
    rounds = []
    for number in range(args.rounds):
        with Server(*options) as plain, Server(*options, "--degrade") as degrading:
            asyncio.run(sustained_rate(plain, 5, 0))
            rate = asyncio.run(sustained_rate(plain, args.seconds, number))
            row: Report = {"sustained_per_second": rate, "offered_per_second": 2 * rate}
            for name, server in (("plain", plain), ("degrade", degrading)):
                answers = asyncio.run(send_at_rate(server, 2 * rate, args.requests, args.seed + number))
                server.settle()
                done = [answer for answer in answers if answer.status == 200]
                row[name] = {
                    "requests": len(answers),
                    "refused": sum(answer.status == 429 for answer in answers),
                    "failed": sum(answer.status not in (200, 429) for answer in answers),
                    "budgets": Counter(answer.served_with["budget"] for answer in done),
                    "whole_seconds": percentiles([answer.total_seconds for answer in done]),
                }
            after = row["sustained_after_per_second"] = asyncio.run(sustained_rate(plain, args.seconds, number))
            row["steady"] = 1 / STEADY < after / rate < STEADY
            rounds.append(row)
            print(json.dumps(row), file=sys.stderr)
    steady = [row for row in rounds if row["steady"]]
    refused = {name: sum(row[name]["refused"] for row in steady) for name in ("plain", "degrade")}
    ratio = refused["degrade"] / max(1, refused["plain"])
    failed = sum(row[name]["failed"] for row in rounds for name in refused)
    return {
        "rows": ROWS,
        "queue": QUEUE,
        "rounds": rounds,
        "steady_rounds": len(steady),
        "refused": refused,
        "refused_with_degrade_to_without": ratio,
        "broken": [
            *(["--degrade does not halve the refusals"] if ratio > 0.5 or not refused["plain"] else []),
            *([f"{failed} requests failed"] if failed else []),
        ],
    }


# Attack and misfortune.


def hostile(args: argparse.Namespace) -> Report:
    options = ["--max-prompt", "64", "--max-output", "16", "--rows", "8", "--queue", "8", "--timeout", "20"]
    with Server(*options) as server:
        body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        expected = httpx.post(f"{server.url}/v1/completions", json=body, verify=False).json()["choices"]
        before = server.held_resources()
        report = attack(server.url, args.seed, args.examples)
        time.sleep(12)  # until the server closes silent connections
        after = server.held_resources()
        again = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30, verify=False).json()["choices"]
        restarts = server.metric("engine_restarts_total")
        server.log.seek(0)
        errors = [line for line in server.log if '"level": "error"' in line]
    report |= {"before": before, "after": after, "errors_in_the_log": errors[:20]}
    report["broken"] += [
        *(["another answer than before"] if again != expected else []),
        *([f"{restarts:g} engines were lost"] if restarts else []),
        *([f"{len(errors)} errors in the log"] if errors else []),
        *(["connections are left"] if after["server"]["files"] > before["server"]["files"] else []),
    ]
    return report


def misfortune(args: argparse.Namespace) -> Report:
    """Failures while 16 streams run and 16 wait."""
    bodies = [{**LONG, "budget": 1 + number % 8} for number in range(32)]
    short = {**LONG, "max_tokens": 4, "stream": False}
    report: Report = {"broken": []}

    def expect(name: str, holds: bool) -> None:
        if not holds:
            report["broken"].append(name)

    async def run_during_streams(server: Server, act: Callable[[], object]) -> list[Answer | BaseException]:
        async with server.client() as client:
            tasks = [asyncio.create_task(ask(client, body)) for body in bodies]
            while not await asyncio.to_thread(server.metric, "num_requests_waiting"):
                await asyncio.sleep(0.1)
            act()
            return await asyncio.gather(*tasks, return_exceptions=True)

    def outcomes(answers: Sequence[Answer | BaseException]) -> Report:
        """How often each error code, status or broken connection occurred."""
        return Counter(str(end.error or end.status) if isinstance(end, Answer) else "broken" for end in answers)

    with Server() as server:
        text = httpx.post(f"{server.url}/v1/completions", json=short, timeout=60, verify=False).json()["choices"]
        killed = asyncio.run(run_during_streams(server, lambda: os.kill(server.engine, signal.SIGKILL)))
        report["engine killed"] = outcomes(killed)
        expect("all end when the engine is killed", all(isinstance(end, Answer) and end.failed for end in killed))
        began = time.perf_counter()
        wait_until(lambda: httpx.get(f"{server.url}/ready", verify=False).status_code == 200)
        report["seconds until it was ready again"] = time.perf_counter() - began
        again = httpx.post(f"{server.url}/v1/completions", json=short, timeout=60, verify=False).json()["choices"]
        expect("the same text after a restart", again == text)
        engines = [int(line.split()[-1].strip('".)}')) for line in log_lines(server, "runs again")]
        expect("one restart", len(engines) == 1)
        report["server killed"] = outcomes(asyncio.run(run_during_streams(server, server.process.kill)))
        wait_until(lambda: not any(map(is_alive, engines)), 10)
    for name, options, signals in (
        ("time to drain over", ("--drain-seconds", "1"), 1),
        ("second signal", ("--drain-seconds", "600"), 2),
    ):
        with Server(*options) as server:

            def stop(server: Server = server, signals: int = signals) -> None:
                for _ in range(signals):
                    server.process.send_signal(signal.SIGTERM)
                    time.sleep(0.5)

            report[name] = outcomes(asyncio.run(run_during_streams(server, stop)))
            code = server.process.wait(60)
            expect(f"{name}: it ends well", code == 0 and not is_alive(server.engine))
    return report


def log_lines(server: Server, text_in_line: str) -> list[str]:
    server.log.seek(0)
    return [line for line in server.log if text_in_line in line]


# Memory.


def memory(args: argparse.Namespace) -> Report:
    """Resident memory after each of 20 rounds of small requests."""
    rss: dict[str, list[float]] = {"server": [], "engine": []}
    failed = 0
    with Server() as server:
        for number in range(20):
            bodies = [case.body for case in draw_cases(args.small_requests // 20, args.seed + number)]
            small = [Case({**body, "prompt": body["prompt"][:40], "max_tokens": 2}, None) for body in bodies]
            failed += sum(answer.failed for answer in asyncio.run(run_cases(server, small, args.at_once)))
            usage = server.held_resources()
            for name, series in rss.items():
                series.append(usage[name]["rss_mb"])
    growth = {name: series[-1] / series[4] - 1 for name, series in rss.items()}  # since the fifth round
    return {
        "requests": args.small_requests,
        "rss_mb": rss,
        "larger": growth,
        "broken": [
            *([f"{failed} requests failed"] if failed else []),
            *(["leak of memory"] if max(growth.values()) > MARGIN else []),
        ],
    }


PARTS = {part.__name__: part for part in (load, overload, hostile, misfortune, memory)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, *ATTACKS, []], help="all by default")
    parser.add_argument(
        "--requests", type=int, default=500, help="of load, and of each half of a round of overload"
    )
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3, help="of overload")
    parser.add_argument("--seconds", type=float, default=20, help="to find what the server sustains")
    parser.add_argument("--small-requests", type=int, default=10_000, help="of memory")
    parser.add_argument("--attack-seconds", type=float, default=30, help="of each attack beside an ordinary client")
    parser.add_argument("--examples", type=int, default=150, help="of schemathesis, for each route and mode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the engine shares the cores with its clients
    previous: Report = json.loads(args.out.read_text("utf-8")) if args.out and args.out.exists() else {}
    report: Report = previous | {
        "benchmark": "soak",
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, 1 thread of the engine",
        "torch": torch.__version__,
        "model": BOX,
    }
    facts = {"command": shlex.join(["python", *sys.argv]), "seed": args.seed, "commit": args.commit}
    parts = args.parts or (*PARTS, *ATTACKS)
    try:
        for part in parts:
            print(part, file=sys.stderr)
            result = PARTS[part](args) if part in PARTS else withstand(part, args.attack_seconds)
            report[part] = facts | result
            print(json.dumps(report[part]["broken"]), file=sys.stderr)
    finally:  # what was measured stays measured
        publish(report, args.out)
    sys.exit(any(report[part]["broken"] for part in parts))


if __name__ == "__main__":
    main()
