"""The page at `/`: served, self-contained, and all of one piece. tests/browser uses it in a real browser."""

import re
from html.parser import HTMLParser

import pytest

from loopformer.serving.app import PAGE_FILES, PAGE_FOLDER, PAGE_POLICY

from .servers import RunningServer

TEXTS = {name: (PAGE_FOLDER / name).read_text(encoding="utf-8") for name, _ in PAGE_FILES.values()}


class Elements(HTMLParser):
    """The elements of index.html, with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self.feed(TEXTS["index.html"])

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attributes)))

    def values(self, name: str) -> list[str]:
        return [value for _, attributes in self.all if (value := attributes.get(name)) is not None]


@pytest.mark.parametrize("path", PAGE_FILES)
def test_every_file_is_served_once_and_then_kept(server: RunningServer, path: str) -> None:
    name, kind = PAGE_FILES[path]
    answer = server.get(path)
    assert answer.status_code == 200
    assert answer.text == TEXTS[name]
    assert answer.headers["content-type"] == kind
    assert answer.headers["content-security-policy"] == PAGE_POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"
    again = server.get(path, **{"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert server.get(path, **{"if-none-match": '"other"'}).status_code == 200
    assert server.client.head(path).status_code == 200
    assert server.client.post(path).status_code == 405


def test_nothing_is_inline_and_nothing_comes_from_elsewhere() -> None:
    assert "unsafe" not in PAGE_POLICY
    for name, text in TEXTS.items():
        addresses = set(re.findall(r"(?:https?:)?//\w[\w/.]*", text))  # a comment has a space there
        assert addresses <= {"http://www.w3.org/2000/svg"}, name  # a name, which nobody fetches
    elements = Elements()
    assert {f"/{path}" for path in (*elements.values("src"), *elements.values("href"))} == set(PAGE_FILES) - {"/"}
    for tag, attributes in elements.all:
        assert tag != "style"
        assert tag != "script" or "src" in attributes
        assert not [name for name in attributes if name == "style" or name.startswith("on")]


def test_its_parts_fit_together() -> None:
    elements = Elements()
    ids = elements.values("id")
    assert len(set(ids)) == len(ids)
    asked = set(re.findall(r'\$\("([\w-]+)"\)', TEXTS["page.js"]))
    named = [*elements.values("for"), *elements.values("aria-labelledby"), *elements.values("aria-describedby")]
    assert asked | set(" ".join(named).split()) <= set(ids)
    fields = [attributes for tag, attributes in elements.all if tag in ("input", "textarea")]
    labelled = {attributes["id"] for attributes in fields if attributes.get("type") != "radio"}
    assert labelled <= set(elements.values("for"))


def test_the_model_says_what_the_page_shows(server: RunningServer) -> None:
    (card,) = server.get("/v1/models").json()["data"]
    assert len(card["flops_per_token"]) == card["loops"]
    assert card["flops_per_token"] == sorted(card["flops_per_token"])
    assert card["tuned_to_answer"] is False
    prompt = "every pass is told"
    answer = server.post("/v1/completions", prompt=prompt, max_tokens=4, temperature=0, logprobs=0, echo=True)
    ids = answer.json()["choices"][0]["logprobs"]["token_ids"]
    assert ids[:-4] == server.post("/tokenize", prompt=prompt).json()["tokens"]
    assert server.post("/detokenize", tokens=ids).json()["prompt"] == answer.json()["choices"][0]["text"]
    assert "/" not in server.get("/openapi.json").json()["paths"]
