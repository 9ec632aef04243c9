"""Log-probabilities of known tokens: one scorer for perplexity, tasks, `lm.score` and validation.

    spans = [Span((*context, *continuation), scored=len(continuation))]
    loglikelihoods(model, spans, trajectories)[trajectory].answers[0]    # (log-likelihood, whether greedy)
    for batch in score_spans(model, windows, trajectories): ...          # log-probabilities token by token
    token_logprobs(model, hidden, targets)                               # from hidden states computed elsewhere

A log-probability is computed in fp32 over the model's vocabulary, without the rows that only pad it. Sums are in
float64. The head runs over chunks of tokens (`head_chunks`), so full logits never exist.

Trajectories that begin with the same steps share the states after those steps exactly, because a loop's output
depends only on its input state and its (t, Δ). They run as a tree, depth first, so that only the M + 1 states of
the current path are in memory.

Rows that begin with the same tokens are packed. The four answers to a question become one sequence: the question,
then each answer. An answer attends to the question and to itself, at the positions it would have alone, so the
outputs equal those of rows run one by one. Rows are sorted by their tokens, so rows with a common prefix become
neighbours. Neighbours are packed together if they share at least half of the tokens before their scored tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, chain

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from loopformer.errors import RunFailed, require
from loopformer.model import LoopedLM
from loopformer.model.block import Rotary
from loopformer.model.conditioning import Condition
from loopformer.trajectory import Trajectory

Tokens = tuple[int, ...]
Answer = tuple[float, bool]  # log-likelihood; whether every token was the most likely one
CountProgress = Callable[[int, int], None]  # called with the number of spans done, and of all spans

BATCH_TOKENS = 8192
MIN_SHARED_TOKENS = 8  # shorter prefixes run once per row, because sharing needs an explicit mask
_MAX_PACK_CONTEXTS = 2  # length limit of a pack in contexts: attention is quadratic in it
_MAX_CHUNK_LOGITS = 1 << 24  # tokens × vocabulary of one chunk: 64 MiB in fp32


def common_prefix(first: Sequence[object], second: Sequence[object]) -> int:
    """The number of leading items that two sequences have in common."""
    for count, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return count
    return min(len(first), len(second))


@dataclass(frozen=True)
class Span:
    """A sequence whose last `scored` tokens are scored, each given all tokens before it."""

    tokens: Tokens
    scored: int

    @classmethod
    def text(cls, ids: Sequence[int], end: int) -> Span:
        """A text of which every token is scored; an end token precedes the first."""
        return cls((end, *ids), len(ids))

    @property
    def inputs(self) -> Tokens:
        """The tokens that the model runs; its last `scored` outputs predict the targets."""
        return self.tokens[:-1]

    @property
    def targets(self) -> Tokens:
        return self.tokens[len(self.tokens) - self.scored :]

    def windows(self, size: int, stride: int | None = None, reach_back: bool = False) -> list[Span]:
        """Cut into spans of at most `size` inputs that score each token once.

        Each window begins `stride` tokens after the previous one, `size` by default, and scores its new tokens.
        `reach_back` extends the last window to the left to `size` inputs, so that its tokens get as much context as
        fits, as in lm-evaluation-harness.
        """
        windows: list[Span] = []
        done = len(self.tokens) - self.scored
        end = done + size
        while done < len(self.tokens):
            stop = min(end, len(self.tokens))
            start = max(0, (stop if reach_back else end) - size - 1)
            windows.append(Span(self.tokens[start:stop], stop - done))
            done, end = stop, end + (stride or size)
        return windows


def head_chunks(model: LoopedLM, hidden: Tensor, chunk: int | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Slices of hidden states [N, D] after the final norm, with their logits [n, V] in fp32.

    `chunk` is the number of tokens in a slice. Rows of the head that only pad the vocabulary are left out.
    """
    size = chunk or max(1, _MAX_CHUNK_LOGITS // model.config.vocab_rows)
    for start in range(0, len(hidden), size):
        part = slice(start, start + size)
        yield part, model.head(hidden[part])[:, : model.config.vocab].float()


def token_logprobs(model: LoopedLM, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """log p of targets [N] given hidden [N, D] in fp32, and whether each target is the most likely token."""
    logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
    is_greedy = torch.empty(len(targets), dtype=torch.bool, device=hidden.device)
    for part, logits in head_chunks(model, hidden):
        all_logprobs = logits.log_softmax(-1)  # [n, V]
        logprobs[part] = all_logprobs.gather(1, targets[part, None])[:, 0]
        is_greedy[part] = all_logprobs.argmax(-1) == targets[part]
    return logprobs, is_greedy


def most_likely(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The most likely tokens [B, N] of log-probabilities [B, V], and their log-probabilities [B, N]."""
    values, tokens = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    return tokens, values


class TrajectoryTree:
    """Runs batches along several trajectories. Loops that trajectories begin with in common run once.

    tree = TrajectoryTree(model, Trajectory.enumerate(8, 4))
    for trajectory, hidden in tree.run(ids): ...      # hidden [B, T, D] after the final norm
    count_loops(tree.trajectories)                   # 90; separately they would take 140
    """

    @torch.no_grad()
    def __init__(self, model: LoopedLM, trajectories: Iterable[Trajectory]) -> None:
        self.model = model
        self.trajectories = sorted(set(trajectories), key=lambda each: each.steps)  # common prefixes side by side
        self._conditions: dict[tuple[Fraction, Fraction], Condition] = {}  # by (t, Δ), for batch size 1
        for trajectory in self.trajectories:
            steps = list(zip(trajectory.times, trajectory.steps, strict=True))
            if not self._conditions.keys() >= set(steps):
                self._conditions.update(zip(steps, model.plan_loops(trajectory, 1).conditions, strict=True))

    def run(self, ids: Tensor) -> Iterator[tuple[Trajectory, Tensor]]:
        """Each trajectory with the hidden states [B, T, D] of ids [B, T] after its last loop."""
        yield from self.run_from(*self.model.embed(ids))

    @torch.no_grad()
    def run_from(
        self, x: Tensor, rotary: Rotary | None, mask: Tensor | None, start: Tensor
    ) -> Iterator[tuple[Trajectory, Tensor]]:
        """As `run`, from embeddings x [B, T, D] and the state before the first loop [B, T, D]."""
        path = [start]  # path[i]: the state after i steps of the previous trajectory
        previous: tuple[Fraction, ...] = ()
        for trajectory in self.trajectories:
            del path[1 + common_prefix(previous, trajectory.steps) :]  # frees the states of finished branches
            for loop in range(len(path) - 1, len(trajectory)):
                condition = self._conditions[trajectory.times[loop], trajectory.steps[loop]]
                state = self.model.inject(path[-1], x, condition, loop)
                path.append(self.model.stack(state, condition.modulation, rotary, mask))
            previous = trajectory.steps
            yield trajectory, self.model.final_norm(path[-1])


def count_loops(trajectories: Iterable[Trajectory]) -> int:
    """How many loops a tree of these trajectories runs."""
    return len({each.steps[:length] for each in trajectories for length in range(1, len(each) + 1)})


@dataclass(frozen=True)
class Pack:
    """Distinct rows as one sequence: the prefix they share, then the suffix of each row."""

    prefix: Tokens
    suffixes: tuple[Tokens, ...]

    def __len__(self) -> int:
        return self.ends[-1]

    @property
    def is_shared(self) -> bool:
        """Whether several rows share the prefix, which needs a mask."""
        return len(self.suffixes) > 1

    @property
    def rows(self) -> list[Tokens]:
        return [self.prefix + suffix for suffix in self.suffixes]

    @property
    def ends(self) -> list[int]:
        """Where each row ends in the sequence."""
        return list(accumulate(map(len, self.suffixes), initial=len(self.prefix)))[1:]


@dataclass(frozen=True)
class PackedBatch:
    """Packs to run together, and the spans they score. Either all packs share a prefix or none does."""

    packs: tuple[Pack, ...]
    spans: tuple[tuple[int, int, int], ...]  # (index of the span, its pack, the end of its row in the pack)

    @property
    def tokens(self) -> int:
        """Tokens that run through the model, without padding."""
        return sum(map(len, self.packs))

    def embed(self, model: LoopedLM) -> tuple[Tensor, Rotary | None, Tensor | None, Tensor]:
        """The embeddings [B, T, D], angles, mask and initial state. Rows of a pack are independent."""
        ids, owners = list[Tensor](), list[Tensor]()
        for pack in self.packs:
            ids.append(torch.tensor([*pack.prefix, *chain(*pack.suffixes)]))
            # All rows attend to owner 0, the prefix. A suffix has a number of its own and is seen by itself alone.
            sizes = torch.tensor([len(pack.prefix), *map(len, pack.suffixes)])
            owners.append(torch.arange(len(sizes)).repeat_interleave(sizes))
        # [B, T], padded at the end, where the causal mask hides the padding.
        tokens, owner = (pad_sequence(rows, batch_first=True).to(model.device) for rows in (ids, owners))
        positions, mask = torch.arange(tokens.shape[1], device=model.device)[None], None
        if self.packs[0].is_shared:  # then all packs are
            visible = ((owner[:, None, :] == owner[:, :, None]) | (owner[:, None, :] == 0)).tril()  # [B, T, T]
            # The position of a token is its index in its own row. That of padding may exceed the context: clamp it.
            positions = (visible.sum(-1) - 1).clamp(max=model.config.context - 1)
            mask = visible[:, None]  # [B, 1, T, T]
        x, rotary = model.add_positions(model.tokens(tokens), positions)
        return x, rotary, mask, model.initial_state(x, positions)


def plan_batches(
    spans: Sequence[Span], context: int, batch_tokens: int = BATCH_TOKENS, share: bool = True
) -> list[PackedBatch]:
    """Batches that score all spans, each of at most `batch_tokens` padded tokens unless a single pack is longer.

    Equal rows run once. Common prefixes run once too, unless `share` is False. Unshared packs come before shared
    ones, and longer before shorter, which keeps padding small.
    """
    span_indices: dict[Tokens, list[int]] = {}  # of the spans that score a row
    unscored: dict[Tokens, int] = {}  # leading tokens of a row whose outputs no span scores: these can be shared
    for number, span in enumerate(spans):
        span_indices.setdefault(span.inputs, []).append(number)
        before = len(span.inputs) - span.scored
        unscored[span.inputs] = min(before, unscored.get(span.inputs, before))
    single_rows = (Pack((), (row,)) for row in span_indices)
    packs = _pack_rows(sorted(span_indices), unscored, _MAX_PACK_CONTEXTS * context) if share else single_rows
    groups: list[list[Pack]] = []
    for pack in sorted(packs, key=lambda pack: (pack.is_shared, -len(pack), pack.prefix, pack.suffixes)):
        last = groups[-1] if groups else []
        if last and last[0].is_shared == pack.is_shared and (len(last) + 1) * len(last[0]) <= batch_tokens:
            last.append(pack)
        else:
            groups.append([pack])
    batches = []
    for group in groups:
        rows = (
            (index, *each) for index, pack in enumerate(group) for each in zip(pack.rows, pack.ends, strict=True)
        )
        scored = tuple((number, index, end) for index, row, end in rows for number in span_indices[row])
        batches.append(PackedBatch(tuple(group), scored))
    return batches


def _pack_rows(rows: Sequence[Tokens], unscored: dict[Tokens, int], max_tokens: int) -> Iterator[Pack]:
    """Pack sorted rows with a common prefix, up to `max_tokens` tokens. A longer row is a pack of its own."""
    start = 0
    while start < len(rows):
        # rows[start:stop] are neighbours with enough in common; `shared` is the length of their prefix.
        shared, stop = 0, start + 1
        while stop < len(rows):
            limit = min(unscored[rows[stop - 1]], unscored[rows[stop]])
            common = min(common_prefix(rows[stop - 1], rows[stop]), limit)
            if common < max(MIN_SHARED_TOKENS, limit / 2):
                break
            shared, stop = (min(shared, common) if shared else common), stop + 1
        prefix, suffixes = rows[start][:shared], list[Tokens]()
        for row in rows[start:stop]:
            if suffixes and sum(map(len, suffixes)) + len(row) > max_tokens:
                yield Pack(prefix, tuple(suffixes))
                suffixes = []
            suffixes.append(row[shared:])
        yield Pack(prefix, tuple(suffixes))
        start = stop


@dataclass(frozen=True)
class BatchScores:
    """The scores of the spans of one batch, concatenated, on the CPU."""

    spans: list[int]  # their indices
    sizes: list[int]  # how many tokens of each are scored
    targets: Tensor  # [N]
    along: dict[Trajectory, tuple[Tensor, Tensor]]  # log-probabilities [N] in fp32, is greedy [N]
    tokens: int  # run through the model, without padding
    loops: Sequence[int] = ()  # with early exit: how many each position took


@contextmanager
def explain_memory(batch_tokens: int) -> Iterator[None]:
    """Turn an out-of-memory error into an error that says to lower --batch-tokens."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunFailed(
            f"Batches of {batch_tokens} tokens do not fit into the device's memory; lower --batch-tokens."
        ) from error


@torch.no_grad()
def score_spans(
    model: LoopedLM,
    spans: Sequence[Span],
    trajectories: Iterable[Trajectory],
    batch_tokens: int = BATCH_TOKENS,
    share: bool = True,
) -> Iterator[BatchScores]:
    """Score spans of at most context + 1 tokens along all trajectories. Yields the scores batch by batch."""
    largest, vocab = max((max(span.tokens) for span in spans), default=0), model.config.vocab
    require(batch_tokens >= 1, f"--batch-tokens must be 1 or more, got {batch_tokens}.")
    require(
        largest < vocab,
        f"There are token ids up to {largest} but the model knows {vocab}; is this the model's own tokenizer?",
    )
    tree = TrajectoryTree(model, trajectories)
    for batch in plan_batches(spans, model.config.context, batch_tokens, share):
        numbers = [number for number, _, _ in batch.spans]
        sizes = [spans[number].scored for number in numbers]
        targets = torch.tensor([token for number in numbers for token in spans[number].targets])  # [N]
        length = max(map(len, batch.packs))  # T of the padded batch; `outputs` indexes the flattened [B * T]
        outputs = [
            pack * length + position
            for number, pack, end in batch.spans
            for position in range(end - spans[number].scored, end)
        ]
        positions, device_targets = torch.tensor(outputs, device=model.device), targets.to(model.device)
        along = {}
        with explain_memory(batch_tokens):
            for trajectory, hidden in tree.run_from(*batch.embed(model)):
                logprobs, greedy = token_logprobs(model, hidden.flatten(0, 1)[positions], device_targets)
                along[trajectory] = logprobs.cpu(), greedy.cpu()
        yield BatchScores(numbers, sizes, targets, along, batch.tokens)


@dataclass(frozen=True)
class Loglikelihoods:
    """One answer per span in order, and the number of tokens run for them."""

    answers: list[Answer]
    tokens: int


def loglikelihoods(
    model: LoopedLM,
    spans: Sequence[Span],
    trajectories: Sequence[Trajectory],
    batch_tokens: int = BATCH_TOKENS,
    share: bool = True,
    count: CountProgress | None = None,
) -> dict[Trajectory, Loglikelihoods]:
    """The log-likelihoods of spans of any length along each trajectory.

    If a span is longer than the model's context, its own context is cut on the left. Scored tokens are never cut:
    they are scored in several windows.
    """
    parts = [
        (n, part) for n, span in enumerate(spans) for part in span.windows(model.config.context, reach_back=True)
    ]
    windows = [part for _, part in parts]
    answers: dict[Trajectory, list[Answer]] = {each: [(0.0, True)] * len(spans) for each in trajectories}
    done = tokens = 0
    for batch in score_spans(model, windows, trajectories, batch_tokens, share):
        for trajectory, scored in batch.along.items():
            parts_of = (torch.split(values, batch.sizes) for values in scored)
            for window, logprobs, is_greedy in zip(batch.spans, *parts_of, strict=True):
                number = parts[window][0]
                total, greedy = answers[trajectory][number]
                answers[trajectory][number] = total + math.fsum(logprobs.tolist()), greedy and bool(is_greedy.all())
        done += len(batch.spans)
        tokens += batch.tokens
        if count:
            count(done * len(spans) // len(windows), len(spans))
    for trajectory, along in answers.items():
        if not all(math.isfinite(total) for total, _ in along):
            raise RunFailed(f"The model's output along {trajectory} is not a number; check its weights and dtype.")
    return {trajectory: Loglikelihoods(along, tokens) for trajectory, along in answers.items()}


@dataclass(frozen=True)
class Score:
    """The log-probabilities of a text's tokens. The first is conditioned on an end token."""

    ids: Tokens
    logprobs: tuple[float, ...]  # of the ids

    @property
    def total(self) -> float:
        return sum(self.logprobs)

    @property
    def perplexity(self) -> float:
        return math.exp(-self.total / len(self.logprobs))


def score_texts(
    model: LoopedLM, texts: Sequence[Sequence[int]], trajectories: Sequence[Trajectory], end: int
) -> list[Score]:
    """The scores of texts that fit the context, each along its own trajectory and after the `end` token."""
    context = model.config.context
    for ids in texts:
        require(len(ids) > 0, "A text to score is empty; give at least one character.")
        # A text of the context's length fits: the end token is an input, and the last token is only a target.
        require(len(ids) <= context, f"A text has {len(ids)} tokens but the context is {context}; shorten it.")
    logprobs: list[tuple[float, ...]] = [()] * len(texts)
    for trajectory in dict.fromkeys(trajectories):
        numbers = [number for number, each in enumerate(trajectories) if each == trajectory]
        spans = [Span.text(texts[number], end) for number in numbers]
        for batch in score_spans(model, spans, [trajectory]):
            values, _ = batch.along[trajectory]
            for span, part in zip(batch.spans, torch.split(values, batch.sizes), strict=True):
                logprobs[numbers[span]] = tuple(part.tolist())
    return [Score(tuple(ids), values) for ids, values in zip(texts, logprobs, strict=True)]
