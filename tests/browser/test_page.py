"""The page as people use it: mouse, keyboard, a phone at night, a server that goes away."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page
    from serving.servers import RunningServer

PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "color_scheme": "dark"}
Open = Callable[..., "Page"]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens the page; at the end nothing may have gone wrong in it, nor come from elsewhere."""
    pages = ExitStack()
    complaints: list[str] = []

    def opened(server: RunningServer, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        pages.callback(context.close)
        page: Page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(server.url) else complaints.append(asked.url))
        # A browser itself notes every answer that is not 200, which some tests are about.
        page.on("console", lambda line: None if "Failed to load" in line.text else complaints.append(line.text))
        started = time.monotonic()
        page.goto(server.url, timeout=0)
        # A busy machine loads the page slowly too. Everything that is waited for comes; the limit ends a hang.
        context.set_default_timeout(max(120_000, 200_000 * (time.monotonic() - started)))
        return page

    with pages:
        yield opened
    assert not complaints


def connected(page: Page) -> Page:
    page.wait_for_selector("#go:enabled")
    return page


def generated(page: Page) -> list[str]:
    """Generate, and wait until all texts and the first lens are there; the titles of the texts."""
    page.click("#go")
    page.wait_for_selector("#lens li")
    page.wait_for_selector("#stop:disabled")
    return page.locator(".text h3").all_inner_texts()


def answer(page: Page, address: str, **content: Any) -> None:
    """Have this answered instead of what the server says."""
    page.unroute(address)
    page.route(address, lambda route: route.fulfill(**content))


def schedule(page: Page) -> str:
    return page.input_value("#trajectory")


def test_texts_of_several_budgets_side_by_side(server: RunningServer, open_page: Open) -> None:
    page = connected(open_page(server))
    assert page.inner_text("#state") == "ready"
    assert "1 to 8 loops" in page.inner_text("#model")
    page.fill("#max_tokens", "12")
    page.fill("#trajectory", "2-1-2-3")
    assert generated(page) == ["1 loop", "2 loops", "4 loops", "4 loops, 2-1-2-3", "8 loops"]
    boxes = [box for text in page.locator(".text").all() if (box := text.bounding_box())]
    assert len({box["y"] for box in boxes}) == 1
    cost = {}
    for text in page.locator(".text").all():
        speed, flops, count = text.locator(".figures span").all_inner_texts()
        assert float(speed.removesuffix(" tokens/s")) > 0
        assert count == "12 tokens"
        cost[text.locator("h3").inner_text()] = float(flops.removesuffix(" MFLOP per token"))
    assert cost["1 loop"] < cost["2 loops"] < cost["4 loops"] == cost["4 loops, 2-1-2-3"] < cost["8 loops"]

    # What stands there is what the server says, and each token has the colour of its probability.
    answer = server.post(
        "/v1/completions", prompt=page.input_value("#prompt"), max_tokens=12, temperature=0.8, seed=0, budget=2
    )
    two = page.locator(".text", has=page.get_by_role("heading", name="2 loops", exact=True))
    tokens = two.locator(".token")
    assert "".join(tokens.all_text_contents()) == answer.json()["choices"][0]["text"]
    colours = tokens.evaluate_all("all => all.map(token => getComputedStyle(token).backgroundColor)")
    surprises = tokens.evaluate_all("all => all.map(token => token.style.getPropertyValue('--surprise'))")
    assert len(set(colours)) == len(set(surprises)) > 3


def test_the_schedule_is_edited_by_keyboard_mouse_and_text(server: RunningServer, open_page: Open) -> None:
    page = connected(open_page(server))
    assert schedule(page) == "8"
    page.focus("#budget")
    for _ in range(4):
        page.keyboard.press("ArrowLeft")
    assert schedule(page) == "4"
    first = page.get_by_role("slider", name="End of step 1")
    first.press("ArrowRight")
    assert schedule(page) == "9-7-8-8"
    assert first.get_attribute("aria-valuenow") == "28.1"
    first.press("End")
    first.press("ArrowRight")
    assert schedule(page) == "15-1-8-8"

    bar, last = page.locator("#bar").bounding_box(), page.get_by_role("slider", name="End of step 3")
    assert bar is not None
    last.hover()
    page.mouse.down()
    page.mouse.move(bar["x"] + bar["width"] * 0.625, bar["y"] + 10, steps=4)
    page.mouse.up()
    page.mouse.move(bar["x"] + 3, bar["y"] + 10)  # which moves nothing any more
    assert schedule(page) == "15-1-4-12"
    page.click("text=Equal steps")
    assert schedule(page) == "4"

    page.fill("#trajectory", "0.5, 0.25, 0.25")
    assert page.locator(".step").all_inner_texts() == ["50 %", "25 %", "25 %"]
    assert page.input_value("#budget") == "3"
    for text, message in (("4-2-", "Write weights"), ("9", "at most 8 loops"), ("2-0", "Write weights")):
        page.fill("#trajectory", text)
        page.press("#trajectory", "Tab")
        assert message in page.inner_text("#trajectory-wrong")
        assert page.get_attribute("#trajectory", "aria-invalid") == "true"
    page.click("#go")
    page.wait_for_function("document.activeElement.id === 'trajectory'")
    assert page.locator(".text").count() == 0


def test_the_lens_shows_the_guess_at_a_token(server: RunningServer, open_page: Open) -> None:
    page = connected(open_page(server))
    page.fill("#max_tokens", "6")
    generated(page)
    eight = page.locator(".text").last
    eight.locator(".token").first.focus()
    with page.expect_response("**/lens") as response:
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
    token = eight.locator(".token").nth(2)
    assert token.get_attribute("aria-pressed") == "true"
    said = response.value.json()
    assert len(said["loops"]) == 8
    page.wait_for_function("word => document.querySelector('#lens-of').textContent.includes(word)", arg="8 loops")
    assert page.locator("#lens li").count() == 8
    words = page.locator("#lens li").last.locator(".word").all_text_contents()
    assert words == [row["token"].replace("\n", "⏎") for row in said["loops"][-1]["top"]]
    bold = page.locator(".guess.chosen .word").all_text_contents()
    assert set(bold) <= {token.text_content()}


def test_perplexity_falls_with_compute(server: RunningServer, open_page: Open) -> None:
    page = connected(open_page(server))
    page.fill("#trajectory", "2-1-1")
    page.click("#measure-go")
    page.wait_for_selector("#curve-said:has-text('175 tokens')")
    rows = [row.locator("td").all_inner_texts() for row in page.locator("#curve-table tbody tr").all()]
    assert [row[0] for row in rows] == [*map(str, range(1, 9)), "2-1-1"]
    perplexity = [float(row[3]) for row in rows]
    assert perplexity[0] > 1.2 * perplexity[1] > 1.2 * perplexity[7] > 12
    assert page.locator("#curve circle").count() == 9
    assert page.locator("#curve .own").count() == 1
    page.fill("#text", "a")
    page.click("#measure-go")
    page.wait_for_selector("#text-wrong:has-text('Two tokens')")


def test_a_wrong_field_is_said_at_the_field(server: RunningServer, open_page: Open) -> None:
    page = connected(open_page(server))
    wrong = [("max_tokens", "9999", "at most 512"), ("max_tokens", "1.5", "valid integer"), ("prompt", "", "empty")]
    wrong += [("temperature", "-1", "greater than or equal to 0"), ("seed", "1e99", "seed")]
    for field, value, message in wrong:
        before = page.input_value(f"#{field}")
        page.fill(f"#{field}", value)
        page.press(f"#{field}", "Control+Enter")
        page.wait_for_selector(f"#{field}-wrong:has-text('{message}')")
        assert page.evaluate("document.activeElement.id") == field
        assert page.locator("[aria-invalid=true]").count() == 1
        page.fill(f"#{field}", before)


def test_texts_stop(server: RunningServer, open_page: Open) -> None:
    page = connected(open_page(server))
    page.fill("#max_tokens", "400")
    page.click("#go")
    page.locator(".text").last.locator(".token").nth(3).wait_for()
    with server.stopped_engine():  # so that no text ends before it is stopped
        page.keyboard.press("Escape")
        page.wait_for_selector(".note:has-text('Stopped.')")
        page.wait_for_selector("#stop:disabled")
    server.wait_for("num_requests_running", 0)


def test_a_server_that_goes_away_is_missed_and_found_again(server: RunningServer, open_page: Open) -> None:
    page = connected(open_page(server))
    page.context.set_offline(True)
    page.wait_for_selector("#trouble:has-text('does not answer')")
    assert page.inner_text("#state") == "no answer"
    page.click("#go")
    page.wait_for_selector("#no-texts:has-text('The server does not answer.')")
    page.context.set_offline(False)
    page.wait_for_selector("#trouble", state="hidden")
    assert page.inner_text("#state") == "ready"
    page.fill("#max_tokens", "4")
    generated(page)


def test_a_key_is_asked_for_and_a_busy_server_says_when(locked: RunningServer, open_page: Open) -> None:
    page = open_page(locked)
    page.get_by_label("API key").fill("simsim")
    page.keyboard.press("Enter")
    page.wait_for_selector("#key-wrong:has-text('does not take this key')")
    assert page.is_disabled("#go")
    page.fill("#key", "naïve")
    page.click("text=Use it")
    page.wait_for_selector("#key-wrong:has-text('ASCII')")
    page.fill("#key", "sesame")
    page.click("text=Use it")
    connected(page)
    assert not page.is_visible("#key")
    page.reload()
    connected(page)

    page.fill("#max_tokens", "4")
    page.get_by_label("in turn").check()  # since one runs and one may wait
    assert generated(page) == ["1 loop", "2 loops", "4 loops"]
    with locked.busy(), locked.stopped_engine():  # so that the text stays in flight
        page.click("#go")
        page.wait_for_selector(".note.failed:has-text('texts in flight, which is your share; try again in')")


def test_answers_that_are_lowered_split_or_broken_off(server: RunningServer, open_page: Open) -> None:
    """As a busy server, a tokenizer of bytes and an engine that dies give them."""
    page = connected(open_page(server))

    def chunk(text: str, *tokens: str) -> dict[str, Any]:
        ids = list(range(len(tokens)))
        logprobs = {"tokens": tokens, "token_ids": ids, "token_logprobs": [-1.0] * len(tokens)}
        return {"choices": [{"text": text, "logprobs": logprobs}]}

    granted = {"budget": 2, "trajectory": "2", "degraded": True, "asked_budget": 8}
    chunks = [{"choices": [], "loopformer": granted}, chunk(" a", " a", "�"), chunk("é b", "�", " b")]
    ends = ["[DONE]", '{"error": {"message": "The engine was lost."}}', None]
    for end in ends:
        data = [*map(json.dumps, chunks), *([end] if end else [])]
        body = "".join(f"data: {event}\n\n" for event in data)
        answer(page, "**/v1/completions", body=body)
        assert generated(page) == ["2 loops"] * 4
        text = page.locator(".text").last
        assert text.locator(".token").all_text_contents() == [" a", "é b"]
        assert "4 tokens" in text.locator(".figures").inner_text()
        note = text.locator(".note").inner_text()
        assert {None: "broke off", "[DONE]": "instead of 8 loops"}.get(end, "The engine was lost.") in note


def test_states_of_the_server_have_words(server: RunningServer, open_page: Open) -> None:
    page = connected(open_page(server))
    for status, words in (("draining", "shutting down"), ("lost", "another one is being started")):
        answer(page, "**/ready", status=503, json={"status": status})
        page.wait_for_selector(f"#trouble:has-text('{words}')")


def test_its_pictures(server: RunningServer, open_page: Open, tmp_path: Path) -> None:
    """The two of docs/serving.md; SCREENSHOTS=docs/images renews them."""
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    wide, narrow = connected(open_page(server)), connected(open_page(server, **PHONE))
    wide.fill("#trajectory", "2-1-2-3")
    for page in (wide, narrow):
        generated(page)
        page.locator(".text").last.locator(".token").nth(3).click()
        page.click("#measure-go")
        page.wait_for_selector("#curve-said:has-text('175 tokens')")
        page.evaluate("document.activeElement.blur()")
    pictures = ((wide, "page.png", "header", "#lens"), (narrow, "page-phone.png", "#lens-title", "#curve-said"))
    for page, name, first, last in pictures:
        start, end = page.locator(first).bounding_box(), page.locator(last).bounding_box()
        assert start is not None
        assert end is not None
        top, bottom = start["y"] - 8, end["y"] + end["height"] + 16
        scrolled = page.evaluate("scrollY")
        size = page.viewport_size
        assert size is not None
        clip: Any = {"x": 0, "y": top + scrolled, "width": size["width"], "height": bottom - top}
        page.screenshot(path=folder / name, full_page=True, clip=clip)
        assert (folder / name).stat().st_size > 20_000


def test_a_phone_at_night(server: RunningServer, open_page: Open) -> None:
    page = connected(open_page(server, **PHONE))
    page.fill("#max_tokens", "8")
    generated(page)
    page.click("#measure-go")
    page.wait_for_selector("#curve-said:has-text('tokens')")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(int(part) for part in re.findall(r"\d+", dark)) < 60
    boxes = [box for text in page.locator(".text").all() if (box := text.bounding_box())]
    assert len({box["x"] for box in boxes}) == 1
    # Every control is reached by Tab, in the order of the page.
    page.focus("#prompt")
    reached: list[str | None] = []
    while not reached or reached[-1] != "go":
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.getAttribute('role')"))
        assert len(reached) < 40
    named = [name for name in reached if name]
    assert named[:3] == ["budget", "trajectory", "equal"]
    assert named[3:10] == ["slider"] * 7
    assert named[-4:] == ["max_tokens", "temperature", "seed", "go"]
