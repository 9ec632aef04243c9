"""The bundled model: its text, its training, and the folder that ships with the package.

    python experiments/box_model.py prepare CORPUS --data data/box          # tokens of text that may be passed on
    python experiments/box_model.py train --data data/box --run runs/box    # on a GPU
    python experiments/box_model.py pack runs/box --data data/box --out src/loopformer/box

CORPUS has the files of SOURCES and, in `heldout`, of HELD as .zst: public-domain books, Wikipedia (CC BY-SA),
documents of the US government (public domain) and MDN's manuals (CC BY-SA, code CC0 or MIT). `train` resumes a run
that was stopped. `pack` writes bf16 weights, settings, tokenizer, the held-out text, and a card with the perplexity
at every budget.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from common import (
    DATA,
    DEVICE,
    RAW,
    TEXT,
    measure_windows,
    perplexities,
    read_zst_lines,
    to_json,
    train_run,
    write_texts,
)

from loopformer.data.prepare import prepare
from loopformer.device import device_name
from loopformer.evaluation.loaded import LoadedModel
from loopformer.evaluation.text import perplexity, read_text
from loopformer.loading import find_model
from loopformer.loading.folder import HELD_OUT, TOKENIZER, save_model

VOCAB = 8192
SOURCES = {  # megabytes of text, whole documents in the order of the file
    "wikipedia_en": 60,
    "frus_documents": 40,
    "mdn_web_docs": 15,
    "gutenberg_books_0": 120,
    "gutenberg_books_1": 120,
    "gutenberg_books_2": 120,
}
PRESET = "elastic"
SETTINGS = {
    "model.blocks": 1,
    "model.loops": 8,
    "model.width": 448,
    "model.heads": 7,
    "model.ffn": 1920,
    "model.context": 512,
    "objective.chunk": 8192,
    "training.steps": 5500,
    "training.batch": 128,
    "training.micro_batch": 128,
    "training.save_every": 1000,
    "training.validate_every": 1000,
    "training.keep": 1,
}
HELD = {"gutenberg_books": 22, "wikipedia_en": 20, "frus_documents": 10, "mdn_web_docs": 10}  # documents held out
SOURCE_NOTES = {  # the origin and licence that the held-out file gives for each
    "gutenberg_books": "Project Gutenberg: {author}, {title}; public domain",
    "wikipedia_en": "Wikipedia: {title}; CC BY-SA",
    "frus_documents": "Foreign Relations of the United States: {volume}; public domain",
    "mdn_web_docs": "MDN Web Docs, Mozilla contributors; CC BY-SA 2.5, code CC0 or MIT",
}
EXCERPT = 1600  # characters of each
SHINGLE = 50  # bytes
MAX_SEEN = 0.2  # share of an excerpt's shingles that the training text may contain: quotations and set phrases
CARD = """\
# The bundled model

A small elastic-depth language model that comes with loopformer: {blocks}⊗{loops}, width {width},
{parameters:.2f} M parameters, context {context}, a byte-level BPE of {vocab:,} tokens, bf16. It shows what a budget
does and lets every command run at once. It is a toy: good for trying budgets, not for facts. What it says may
be wrong or offensive, as old books can be.

| loops | perplexity | bits per byte |
|---|---|---|
{rows}

On `{held_out}`, which is held out of its data; `loopformer eval text --budgets 1,2,3,4,5,6,7,8` reproduces it.
English, after {seen:.0f} M tokens ({epochs:.1f} epochs, {steps:,} steps, seed {seed}) on {hardware}, with the
preset `elastic`; `experiments/box_model.py` made it.

Trained only on text that may be passed on: books of Project Gutenberg in the public domain, English Wikipedia
(CC BY-SA), Foreign Relations of the United States (public domain) and MDN Web Docs (CC BY-SA 2.5, code CC0 or MIT).
`{held_out}` is of the same sources under the same licences, and names the source of each text. Weights and
settings: MIT, as loopformer.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    prepare_box, train_box, pack_box = (verbs.add_parser(verb) for verb in ("prepare", "train", "pack"))
    for verb in (prepare_box, train_box, pack_box):
        verb.add_argument("--data", type=Path, required=True)
    prepare_box.add_argument("corpus", type=Path)
    train_box.add_argument("--run", type=Path, required=True)
    train_box.add_argument("--commit", default="unknown")
    train_box.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of `loopformer train`")
    pack_box.add_argument("run", type=Path)
    pack_box.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.verb == "prepare":
        write_texts(args.corpus, args.data / TEXT, SOURCES)
        write_held_out(args.corpus, args.data / TEXT, args.data / HELD_OUT)
        print(prepare([str(args.data / TEXT)], args.data / DATA, train_tokenizer=VOCAB, val_fraction=0.003))
    elif args.verb == "train":
        train(args.data / DATA, args.run, args.commit, args.set)
    else:
        pack(args.run, args.data / DATA, args.out)


def train(data: Path, run: Path, commit: str, changes: list[str]) -> None:
    """Train, then measure the held-out windows at every budget and along every schedule of half the loops."""
    facts = train_run(PRESET, {**SETTINGS, "data.path": data}, changes, run, commit)
    result = {"hardware": device_name(DEVICE), **facts, "windows": measure_windows(run, data)}
    (run / RAW).write_text(to_json(result) + "\n", encoding="utf-8")
    print("  ".join(f"{value:.2f}" for value in perplexities(result).values()))


def pack(run: Path, data: Path, out: Path) -> None:
    """Write the folder that ships: the model in bf16, its tokenizer, a held-out text and the card."""
    model, facts = find_model(run)[0], json.loads((run / RAW).read_text("utf-8"))
    about = {name: facts[name] for name in ("command", "commit", "hardware")}
    about["command"] = about["command"].replace(str(data), "data/box/data")  # wherever the data was
    save_model(model.to(torch.bfloat16), out, about)
    shutil.copyfile(data / TOKENIZER, out / TOKENIZER)
    shutil.copyfile(data.parent / HELD_OUT, out / HELD_OUT)
    (out / "README.md").write_text(card(out, facts), encoding="utf-8")
    print({file.name: file.stat().st_size for file in sorted(out.iterdir())})


def card(folder: Path, facts: dict[str, Any]) -> str:
    """The card: what the model is, its training data, and its perplexity as `loopformer eval` measures it."""
    loaded, plan = LoadedModel.open(str(folder)), facts["plan"]
    config = loaded.model.config
    text = read_text(str(folder / HELD_OUT), loaded.lm.need_tokenizer())
    perplexity_rows = perplexity(loaded.model, text, range(1, config.loops + 1))
    return CARD.format(
        **{name: getattr(config, name) for name in ("blocks", "loops", "width", "context", "vocab")},
        parameters=plan["parameters"] / 1e6,
        rows="\n".join(
            f"| {row['budget']} | {row['perplexity']:.2f} | {row['bits_per_byte']:.3f} |" for row in perplexity_rows
        ),
        seen=plan["tokens"] / 1e6,
        epochs=plan["epochs"],
        steps=plan["steps"],
        seed=facts["settings"]["training"]["seed"],
        hardware=facts["hardware"],
        held_out=HELD_OUT,
    )


def write_held_out(corpus: Path, training_text: Path, path: Path) -> None:
    """Write an excerpt of each of some documents that are in no training file, unless the text is in one."""
    excerpts = []
    for name, count in HELD.items():
        for line in islice(read_zst_lines(corpus / "heldout" / f"{name}.jsonl.zst"), count):
            document = json.loads(line)
            text, source = document["text"], SOURCE_NOTES[name].format_map(document)
            excerpts.append({"text": text[len(text) // 3 :][:EXCERPT], "source": source})
    shares = seen_shares([excerpt["text"] for excerpt in excerpts], training_text)
    with path.open("w", encoding="utf-8") as file:
        for excerpt, share in zip(excerpts, shares, strict=True):
            if share <= MAX_SEEN:
                file.write(json.dumps(excerpt, ensure_ascii=False) + "\n")
            else:
                print(f"left out, {share:.0%} of it is in the training text: {excerpt['source']}")


def seen_shares(texts: Sequence[str], training_text: Path) -> list[float]:
    """The share of each text's shingles that the training text contains."""
    shingles = [np.unique(hash_shingles(text)) for text in texts]
    wanted = np.unique(np.concatenate(shingles))
    seen = np.zeros(len(wanted), bool)
    for file in sorted(training_text.glob("*.jsonl")):
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                hashes = hash_shingles(json.loads(line)["text"])
                index = np.searchsorted(wanted, hashes).clip(max=len(wanted) - 1)
                seen[index[wanted[index] == hashes]] = True
    return [float(seen[np.searchsorted(wanted, hashes)].mean()) for hashes in shingles]


def hash_shingles(text: str) -> npt.NDArray[np.uint64]:
    """A hash of every SHINGLE bytes of the text in a row, with each run of white space as one space."""
    data = np.frombuffer(" ".join(text.split()).encode(), np.uint8).astype(np.uint64)
    hashes = np.zeros(max(0, len(data) - SHINGLE + 1), np.uint64)
    for offset in range(SHINGLE):  # a polynomial modulo 2⁶⁴
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + data[offset : offset + len(hashes)]
    return hashes ^ (hashes >> np.uint64(32))


if __name__ == "__main__":
    main()
