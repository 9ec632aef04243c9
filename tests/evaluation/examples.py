"""Two examples of each of the paper's tasks, as our local files have them and as the Hub's data sets have them."""

import json
from pathlib import Path
from typing import Any

from loopformer.evaluation.tasks import TASKS

Example = dict[str, Any]

_COPA = [
    {"premise": "The man turned on the faucet.", "choice1": "The toilet filled with water.",
     "choice2": "Water flowed from the spout.", "question": "effect", "idx": 0, "label": 1},
    {"premise": "The girl found a bug.", "choice1": "She pulled the box.", "choice2": "She lost her appetite.",
     "question": "cause", "idx": 1, "label": 0},
]  # fmt: skip
# Cleaning is not the same twice over: three spaces become two, and two become one.
_HELLASWAG_HUB = [
    {"ind": 7, "activity_label": "Home and Garden", "ctx_a": "How to sweep. [title] Take a broom. [step] Sweep the",
     "ctx_b": "floor is", "endings": ["clean. [substeps] Now   rest.", "wet.", "old [title] and red.", " loud. "],
     "label": "2", "source_id": "wikihow~1", "split": "val", "split_type": "indomain", "ctx": ""},
    {"ind": 9, "activity_label": "Archery", "ctx_a": "A man draws a bow.", "ctx_b": "he", "label": "0",
     "endings": ["lets go.", "swims.", "sings.", "melts."], "source_id": "activitynet~2", "split": "val",
     "split_type": "zeroshot", "ctx": ""},
]  # fmt: skip
_HELLASWAG = [
    {"ind": 7, "query": "Home and Garden: How to sweep.. Take a broom. Sweep the Floor is",
     "choices": ["clean. Now  rest.", "wet.", "old. and red.", "loud."], "label": 2},
    {"ind": 9, "query": "Archery: A man draws a bow. He", "choices": ["lets go.", "swims.", "sings.", "melts."],
     "label": 0},
]  # fmt: skip
_LAMBADA = [
    {"text": "He looked at the stone for a long time.\n\nIt was only a stone"},
    {"text": "“Is it you?” she asked, and he said that it was he"},
]
_OPENBOOKQA = [
    {"id": "8-1", "question_stem": "Bees make", "answerKey": " B",
     "choices": {"text": ["milk", "honey", "iron", "rain"], "label": ["A", "B", "C", "D"]}},
    {"id": "8-2", "question_stem": "The sun is a", "answerKey": "A",
     "choices": {"text": ["star", "moon", "rock", "cloud"], "label": ["A", "B", "C", "D"]}},
]  # fmt: skip
_PIQA = [
    {"goal": "How do you boil water?", "sol1": "Heat it.", "sol2": "Paint it.", "label": 0},
    {"goal": "To dry a cup,", "sol1": "fill it.", "sol2": "wipe it with a cloth.", "label": 1},
]
_PROBLEMS = [
    {"question": "Who works?", "options": ["Jones", "Smith's son", "a \"lazy\" boy", "nobody"], "answer": "A"},
    {"question": "The shop is  _  .", "options": ["red", "big", "far", "shut"], "answer": "C"},
    {"question": "What does he make?", "options": ["shoes", "tacks", "bread", "money"], "answer": "B"},
]  # fmt: skip
_RACE = [
    {"id": "high1.txt", "article": "Jones works all day.\nHe makes tacks.", "problems": _PROBLEMS},
    {"id": "high2.txt", "article": 'It rains; "so what?"', "problems": _PROBLEMS[:1]},
]
_RACE_HUB = [
    {"article": "Jones works all day.\nHe makes tacks.",
     "problems": """[{'question': 'Who works?', 'answer': 'A', 'options': ['Jones', "Smith's son", """
                 """'a "lazy" boy', 'nobody']}, {'question': 'The shop is  _  .', 'answer': 'C', 'options': """
                 """['red', 'big', 'far', 'shut']}, {'question': 'What does he make?', 'answer': 'B', """
                 """'options': ['shoes', 'tacks', 'bread', 'money']}]"""},
    {"article": "It rains; \"so what?\"",
     "problems": """[{'question': 'Who works?', 'answer': 'A', 'options': ['Jones', "Smith's son", """
                 """'a "lazy" boy', 'nobody']}]"""},
]  # fmt: skip
_SOCIAL_IQA = [
    {"context": "Tracy went home.", "question": "Why?", "answerA": "to rest", "answerB": "to sing",
     "answerC": "to fly", "label": "1"},
    {"context": "Riley ate.", "question": "What now?", "answerA": "sleep", "answerB": "burn", "answerC": "rain",
     "label": "3"},
]  # fmt: skip
_ARC = [
    {"id": "M_1", "question": "What is water?", "answerKey": "C",
     "choices": {"text": ["a metal", "a gas", "a liquid", "a sound"], "label": ["A", "B", "C", "D"]}},
    {"id": "M_2", "question": "Which is hot?", "answerKey": "1",
     "choices": {"text": ["fire", "ice", "snow"], "label": ["1", "2", "3"]}},
]  # fmt: skip
_SCIQ = [
    {"question": "Who wrote it?", "distractor1": "shaw", "distractor2": "linné", "distractor3": "scopes",
     "correct_answer": "darwin", "support": ""},
    {"question": "What falls?", "distractor1": "fire", "distractor2": "light", "distractor3": "time",
     "correct_answer": "rain", "support": "  Rain falls from clouds."},
]  # fmt: skip
_WINOGRANDE = [
    {"sentence": "Sarah knew Maria so _ got the case.", "option1": "Sarah", "option2": "Maria", "answer": "2"},
    {
        "sentence": "The cup did not fit the box as the _ was big.",
        "option1": "cup",
        "option2": "box",
        "answer": "1",
    },
]

LOCAL: dict[str, list[Example]] = {
    "copa": _COPA,
    "hellaswag": _HELLASWAG,
    "lambada_openai": _LAMBADA,
    "openbookqa": _OPENBOOKQA,
    "piqa": _PIQA,
    "race": _RACE,
    "social_iqa": _SOCIAL_IQA,
    "arc_easy": _ARC,
    "arc_challenge": _ARC,
    "sciq": _SCIQ,
    "winogrande": _WINOGRANDE,
}
HUB = {**LOCAL, "hellaswag": _HELLASWAG_HUB, "race": _RACE_HUB}


def write_lines(path: Path, examples: list[Example]) -> Path:
    path.write_text("".join(json.dumps(example) + "\n" for example in examples), encoding="utf-8")
    return path


def write_local(folder: Path, form: dict[str, list[Example]] = LOCAL) -> Path:
    """A folder as `--data` takes it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, examples in form.items():
        write_lines(folder / f"{TASKS[name].file or name}.{TASKS[name].split}.jsonl", examples)
    return folder
