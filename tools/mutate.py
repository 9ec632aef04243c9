"""Mutation study: put small faults into the source, one at a time, and count those that the tests notice.

    python tools/mutate.py --count 160 --seed 0 --out build/mutants.json

A mutant is killed if its module's tests fail or exceed the time limit. Tests run in a copy of the tree, so the
checkout stays as it is. The results are written after every mutant, and a stopped study continues with the same
command. A survivor that no test can tell from the original gets a key `equivalent` with the reason, by hand.
"""

import argparse
import ast
import os
import platform
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from loopformer.files import read_json, write_json

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "src/loopformer/"
TARGETS: dict[str, tuple[str, ...]] = {  # a module → the tests that should notice its faults, in seconds
    "trajectory.py": ("tests/test_trajectory.py",),
    "scoring.py": ("tests/test_scoring.py",),
    "analysis/metrics.py": ("tests/analysis/test_metrics.py",),
    "data/loader.py": ("tests/data/test_loader.py",),
    "data/shards.py": ("tests/data/test_shards.py", "tests/data/test_loader.py"),
    "data/splits.py": ("tests/data/test_splits.py", "tests/data/test_bounds.py"),
    "evaluation/early_exit.py": ("tests/evaluation/test_early_exit.py",),
    "evaluation/schedules.py": ("tests/evaluation/test_schedules.py",),
    "inference/batch_file.py": ("tests/inference/test_batch_file.py",),
    "inference/budget.py": ("tests/inference/test_budget.py",),
    "inference/detokenizer.py": ("tests/inference/test_detokenizer.py", "tests/inference/test_sequence.py"),
    "inference/engine.py": ("tests/inference/test_engine.py", "tests/inference/test_faults.py"),
    "inference/kv_cache.py": ("tests/inference/test_kv_cache.py", "tests/inference/test_engine.py"),
    "inference/request.py": ("tests/inference/test_request.py", "tests/inference/test_sampling.py"),
    "inference/runner.py": ("tests/inference/test_runner.py", "tests/inference/test_engine.py"),
    "inference/sampling.py": ("tests/inference/test_sampling.py",),
    "inference/scheduler.py": ("tests/inference/test_scheduler.py", "tests/inference/test_engine.py"),
    "inference/sequence.py": ("tests/inference/test_sequence.py", "tests/inference/test_engine.py"),
    "model/block.py": ("tests/model/test_looped.py", "tests/model/test_cache.py"),
    "model/cache.py": ("tests/model/test_cache.py", "tests/model/test_looped.py"),
    "model/conditioning.py": ("tests/model/test_looped.py", "tests/model/test_cost.py"),
    "model/cost.py": ("tests/model/test_cost.py",),
    "model/looped.py": ("tests/model/test_looped.py", "tests/model/test_cache.py"),
    "model/packed.py": ("tests/model/test_packed.py",),
    "serving/protocol.py": ("tests/serving/test_protocol.py", "tests/serving/test_app.py"),
    "serving/service.py": ("tests/serving/test_service.py", "tests/serving/test_app.py"),
    "training/objective.py": ("tests/training/test_objective.py",),
    "training/optimizer.py": ("tests/training/test_optimizer.py",),
    "training/plan.py": ("tests/training/test_plan.py",),
}
PAIRS: list[tuple[Any, Any]] = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)]
PAIRS += [(ast.In, ast.NotIn), (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.Div)]
SWAPS = {ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult} | {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
OPPOSITES = {"min": "max", "any": "all", "minimum": "maximum", "floor": "ceil"}
OPPOSITES |= {opposite: name for name, opposite in OPPOSITES.items()}
Fault = tuple[str, Any, str]  # operator, the node that is replaced, its replacement


class Mutant(NamedTuple):
    """A replacement of the bytes start:stop of a module."""

    module: str
    name: str  # its line and its change; line numbers would change too often
    operator: str
    start: int
    stop: int
    after: str


def find_mutants(module: str) -> list[Mutant]:
    """The mutants of a module, in the order of its source."""
    for path in (SOURCE + module, *TARGETS.get(module, ())):
        if module not in TARGETS or not (ROOT / path).exists():
            sys.exit(f"{path} is missing; correct TARGETS in tools/mutate.py.")
    source = (ROOT / SOURCE / module).read_bytes()
    lines = source.splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]
    faults = {fault: None for node in mutable_nodes(ast.parse(source)) for fault in faults_of(node)}
    mutants: dict[str, Mutant] = {}
    for operator, node, after in faults:
        start, stop = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        before = " ".join(source[start:stop].decode().split())
        name = f"{module}: {lines[node.lineno - 1].decode().strip()}: {before} → {after}"
        while name in mutants:
            name += "'"
        mutants[name] = Mutant(module, name, operator, start, stop, after)
    return list(mutants.values())


def mutable_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all in it, except texts, annotations, assertions and imports for type checkers."""
    children = ast.iter_child_nodes(node)
    match node:
        case ast.Assert() | ast.Raise() | ast.JoinedStr() | ast.arg():
            return
        case ast.FunctionDef(name="__repr__" | "__str__") | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            children = iter([*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body])
        case ast.ClassDef():
            children = iter(node.body)
        case ast.AnnAssign():
            children = iter([node.value] if node.value else [])
    yield node
    for child in children:
        yield from mutable_nodes(child)


def faults_of(node: ast.AST) -> Iterator[Fault]:
    """The faults that can be put into a node itself."""
    match node:
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            for index, op in enumerate(ops):
                swapped = ast.Compare(left, [*ops[:index], SWAPS[type(op)](), *ops[index + 1 :]], comparators)
                yield "swapped comparison", node, f"({ast.unparse(swapped)})"
        case ast.BoolOp(op=op, values=values):
            yield "swapped and/or", node, f"({ast.unparse(ast.BoolOp(SWAPS[type(op)](), values))})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SWAPS:
            yield "swapped arithmetic", node, f"({ast.unparse(ast.BinOp(left, SWAPS[type(op)](), right))})"
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            yield "off by one", node, str(value + 1)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name) as function) if name in OPPOSITES:
            yield "opposite function", function, ast.unparse(function).removesuffix(name) + OPPOSITES[name]
        case ast.Slice(lower=lower, upper=upper):
            yield from (("dropped bound", bound, "") for bound in (lower, upper) if bound)
        case ast.If() | ast.While() | ast.IfExp() | ast.comprehension():
            for test in node.ifs if isinstance(node, ast.comprehension) else [node.test]:
                yield from negate(test)
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "return None", node, "return None"
        case ast.AugAssign() | ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
            yield "dropped statement", node, "pass"
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from statement_faults(node)


def negate(test: ast.expr) -> Iterator[Fault]:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield "negated condition", test, f"({ast.unparse(test.operand)})"
    elif not isinstance(test, ast.Compare) or isinstance(test.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
        # Swapping any other comparison is its negation.
        yield "negated condition", test, f"(not ({ast.unparse(test)}))"


def statement_faults(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Fault]:
    """An early return, and assignments dropped whose targets already have a value."""
    nodes = list(ast.walk(function))
    body = function.body[ast.get_docstring(function) is not None :]
    returns_value = any(isinstance(each, ast.Return) and each.value for each in nodes)
    if body and not returns_value and not isinstance(body[0], ast.Pass | ast.Raise | ast.Assert):
        yield "early return", body[0], "return"
    stores = [each for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
    first_lines = {each.id: each.lineno for each in sorted(stores, key=lambda each: -each.lineno)}
    first_lines |= {each.arg: 0 for each in nodes if isinstance(each, ast.arg)}
    for each in nodes:
        match each:
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield "dropped statement", each, "pass"
            case ast.Assign(targets=[ast.Name(id=name)]) if first_lines[name] < each.lineno:
                yield "dropped statement", each, "pass"


def run_tests(tree: Path, tests: tuple[str, ...], limit: float | None) -> tuple[str, float]:
    """Whether a tree survives its tests, and the seconds they take."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    # CI=1 has hypothesis draw the same examples each time. Bytecode of a mutant must not serve the next one.
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "CI": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    settings: dict[str, Any] = {"cwd": tree, "env": environment, "start_new_session": True}
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **settings) as process:
        try:
            outcome = "killed" if process.wait(limit) else "survived"
        except subprocess.TimeoutExpired:
            outcome = "timeout"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also the servers that tests started
    return outcome, time.monotonic() - started


def run_mutants(mutants: list[Mutant]) -> Iterator[tuple[Mutant, str]]:
    """Each mutant and its outcome, in a copy of the tree."""
    limits: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        for part in ("src", "tests"):
            shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        for mutant in mutants:
            tests, path = TARGETS[mutant.module], tree / SOURCE / mutant.module
            if mutant.module not in limits:
                outcome, seconds = run_tests(tree, tests, None)
                if outcome != "survived":
                    sys.exit(f"{' '.join(tests)} fails without a mutant; mend it first.")
                limits[mutant.module] = 60 + 5 * seconds  # so that a busy machine kills no mutant
            source = path.read_bytes()
            path.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.stop :])
            outcome, _ = run_tests(tree, tests, limits[mutant.module])
            path.write_bytes(source)
            yield mutant, outcome


def survivors(records: dict[str, dict[str, str]]) -> list[str]:
    """The names of mutants that a test could kill, and none does."""
    return [name for name, each in records.items() if each["outcome"] == "survived" and "equivalent" not in each]


def count_outcomes(records: dict[str, dict[str, str]]) -> dict[str, float]:
    """The counts of a study; equivalent mutants do not count in the share of killed ones."""
    equivalent, survived = sum("equivalent" in each for each in records.values()), len(survivors(records))
    killed = len(records) - equivalent - survived
    share = round(killed / max(1, killed + survived), 3)
    return {"killed": killed, "survived": survived, "equivalent": equivalent, "killed_share": share}


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the faults in the source that the tests notice.")
    parser.add_argument("--count", type=int, default=160, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", help="a module such as model/cache.py; may be repeated")
    parser.add_argument("--retry", action="store_true", help="run survivors once more")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants.json")
    args = parser.parse_args()
    mutants = [mutant for module in args.only or TARGETS for mutant in find_mutants(module)]
    drawn = random.Random(args.seed).sample(mutants, len(mutants))[: args.count]
    described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    facts = {
        "command": shlex.join(["python", "tools/mutate.py", *sys.argv[1:]]),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "seed": args.seed,
        "commit": described.stdout.strip() or "unknown",
    }
    records: dict[str, dict[str, str]] = read_json(args.out)["mutants"] if args.out.exists() else {}
    again = survivors(records) if args.retry else []
    missing = [mutant for mutant in drawn if mutant.name not in records or mutant.name in again]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for mutant, outcome in run_mutants(sorted(missing, key=lambda each: (each.module, each.start))):
        records[mutant.name] = {"operator": mutant.operator, "outcome": outcome}
        print(f"{outcome:8} {mutant.name}", flush=True)
        write_json(args.out, {**facts, **count_outcomes(records), "mutants": records})
    print(count_outcomes(records))


if __name__ == "__main__":
    main()
