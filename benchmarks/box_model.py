"""The model in the box: its text, and how it is trained.

    python benchmarks/box_model.py prepare CORPUS --data data/box          # tokens of sources that may be passed on

CORPUS has the files of SOURCES as .zst: public-domain books, Wikipedia (CC BY-SA), documents of the US government
(public domain) and MDN's manuals (CC BY-SA, code CC0).
"""

import argparse
from pathlib import Path

from paper_claims import DATA, TEXT, write_texts

from loopformer.data.prepare import prepare

VOCAB = 8192
SOURCES = {  # megabytes of text, whole documents in the order of the file
    "wikipedia_en": 60,
    "frus_documents": 40,
    "mdn_web_docs": 15,
    "gutenberg_books_0": 120,
    "gutenberg_books_1": 120,
    "gutenberg_books_2": 120,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("prepare")
    one.add_argument("corpus", type=Path)
    one.add_argument("--data", type=Path, required=True)
    asked = parser.parse_args()
    write_texts(asked.corpus, asked.data / TEXT, SOURCES)
    index = prepare([str(asked.data / TEXT)], asked.data / DATA, train_tokenizer=VOCAB, val_fraction=0.003)
    print(index)


if __name__ == "__main__":
    main()
