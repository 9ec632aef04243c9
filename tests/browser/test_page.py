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
    page.click("#go")  # which hides the lens of earlier texts
    page.wait_for_selector("#stop:disabled")
    page.wait_for_selector("#lens")
    return page.locator(".text h3").all_inner_texts()


def answer(page: Page, address: str, **content: Any) -> None:
    """Have this answered instead of what the server says."""
    page.unroute(address)
    page.route(address, lambda route: route.fulfill(**content))


def own_schedule(page: Page, steps: str) -> None:
    page.check("#own")
    page.fill("#trajectory", steps)


def schedule(page: Page) -> str:
    return page.input_value("#trajectory")


def test_texts_of_several_budgets_have_bars_of_time_and_compute(server: RunningServer, open_page: Open) -> None:
    page = connected(open_page(server))
    assert page.inner_text("#state") == "ready"
    assert "1 to 8 loops" in page.inner_text("#model")
    assert "never tuned to answer" in page.inner_text("#untuned")
    page.fill("#max_tokens", "12")
    page.fill("#seed", "3")
    own_schedule(page, "2-1-2-3")
    assert generated(page) == ["1 loop", "2 loops", "4 loops", "4 loops, 2-1-2-3", "8 loops"]
    bars: dict[str, list[float]] = {}
    flops = server.get("/v1/models").json()["data"][0]["flops_per_token"]
    for text in page.locator(".text").all():
        count, speed = text.locator(".figures span").all_inner_texts()
        assert count == "12 tokens"
        assert float(speed.removesuffix(" tokens/s")) > 0
        seconds, total = text.locator(".measure .value").all_inner_texts()
        assert float(seconds.removesuffix(" s")) > 0
        loops = int(text.locator("h3").inner_text()[0])
        assert float(total.removesuffix(" MFLOP")) == pytest.approx(12e-6 * flops[loops - 1], rel=0.01)
        widths = [box["width"] for bar in text.locator(".fill").all() if (box := bar.bounding_box())]
        bars[text.locator("h3").inner_text()] = widths
    time_bars, compute_bars = zip(*bars.values(), strict=True)
    track = page.locator(".track").first.bounding_box()
    assert track is not None
    assert max(time_bars) == max(compute_bars) == pytest.approx(track["width"], abs=1)
    one, two, four, own, eight = compute_bars
    assert one < two < four == own < eight

    # What stands there is what the server says, and each token has the colour of its probability.
    answer = server.post(
        "/v1/completions",
        prompt=page.input_value("#prompt"),
        max_tokens=12,
        temperature=0.8,
        top_p=0.95,
        seed=3,
        budget=2,
    )
    two_loops = page.locator(".text", has=page.get_by_role("heading", name="2 loops", exact=True))
    shown = two_loops.locator(".tokens").text_content()
    assert shown == page.input_value("#prompt") + answer.json()["choices"][0]["text"]
    tokens = two_loops.locator(".token")
    assert all(text == text.lstrip() or not text.strip() for text in tokens.all_text_contents())
    colours = tokens.evaluate_all("all => all.map(token => getComputedStyle(token).backgroundColor)")
    surprises = tokens.evaluate_all("all => all.map(token => token.style.getPropertyValue('--surprise'))")
    assert len(set(colours)) == len(set(surprises)) > 3


def test_texts_run_in_turn_unless_all_at_once_is_chosen(server: RunningServer, open_page: Open) -> None:
    page = connected(open_page(server))
    page.fill("#max_tokens", "12")

    def notes_of_a_start() -> list[str]:
        """The notes of the texts when as many have begun as can, with an engine that stands still."""
        with server.stopped_engine():
            begun = len(requests)
            page.click("#go")
            count = 1 if page.is_checked("#in-turn") else 4
            while len(requests) < begun + count:
                page.wait_for_event("request")
            notes = page.locator(".note").all_text_contents()
        page.wait_for_selector("#stop:disabled")
        return notes

    requests: list[str] = []
    page.on("request", lambda asked: requests.append(asked.url) if asked.url.endswith("completions") else None)
    assert notes_of_a_start() == ["", "Waiting.", "Waiting.", "Waiting."]
    # The next test looks at the times, by a clock of its own. On a busy machine all tokens may come at once.
    assert "shared the server" not in page.inner_text("#texts-said")
    page.get_by_label("all at once").check()
    assert notes_of_a_start() == [""] * 4
    assert "shared the server" in page.inner_text("#texts-said")


def test_the_cost_of_loops_leaves_out_slow_starts_and_names_odd_times(
    server: RunningServer, open_page: Open
) -> None:
    page = connected(open_page(server))
    logprobs = {"tokens": [" a"], "token_ids": [1], "token_logprobs": [-1.0]}
    events = [json.dumps({"choices": [{"text": " a", "logprobs": logprobs}]})] * 9
    answer(page, "**/v1/completions", body="".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]))

    def takeaway(*arrivals: list[float]) -> str:
        """The sentence if the tokens of each text arrive at these milliseconds."""
        times = [time for text in arrivals for time in (0, *text)]
        page.evaluate("times => { performance.now = () => times.shift(); }", times)
        generated(page)
        return page.inner_text("#texts-said")

    def every(milliseconds: float, start: float = 0) -> list[float]:
        return [start + milliseconds * number for number in range(9)]

    plain = takeaway(every(10, start=9000), every(12), every(20), every(40))
    cost = "Per token, 8 loops took 4.0 times as long as 1 loop, for 4.0 times the compute"
    assert plain == f"{cost} (median time between tokens)."
    at_once = [0.0, *sorted([*every(10, 10)[:4], *every(10, 10.1)[:4]])]  # two tokens in one read
    assert takeaway(every(10), every(12), every(20), at_once).startswith("Per token, 8 loops took 0.5 times")
    odd = takeaway(every(20), every(12), every(20), every(40))
    assert odd == plain.replace("4.0 times as long", "2.0 times as long") + (
        " 2 loops came faster than 1 loop, so the machine is busy with other work and these times say little."
    )


def test_a_seed_is_drawn_and_repeats_the_texts(server: RunningServer, open_page: Open) -> None:
    page = connected(open_page(server))
    page.fill("#max_tokens", "12")
    generated(page)
    texts = page.locator(".tokens").all_text_contents()
    said = page.inner_text("#sampling-said")
    seed = re.search(r"Temperature 0\.8, top-p 0\.95, seed (\d+)\.", said)
    assert seed is not None
    page.fill("#seed", seed[1])
    generated(page)
    assert page.locator(".tokens").all_text_contents() == texts
    page.fill("#seed", "")
    page.fill("#temperature", "0")
    generated(page)
    assert page.inner_text("#sampling-said") == "Greedy: every token is the most likely one."


def test_the_schedule_is_edited_by_keyboard_mouse_and_text(server: RunningServer, open_page: Open) -> None:
    page = connected(open_page(server))
    assert not page.is_visible("#trajectory")
    page.check("#own")
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

    page.fill("#trajectory", "0.25, 0.25, 0.5")
    assert page.locator(".step").all_inner_texts() == ["25 %", "25 %", "50 %"]
    assert page.input_value("#budget") == "3"
    for text, message in (("4-2-", "Write weights"), ("9", "at most 8 loops"), ("2-0", "Write weights")):
        page.fill("#trajectory", text)
        page.press("#trajectory", "Tab")
        assert message in page.inner_text("#trajectory-wrong")
        assert page.get_attribute("#trajectory", "aria-invalid") == "true"
    page.click("#go")
    page.wait_for_function("document.activeElement.id === 'trajectory'")
    assert page.locator(".text").count() == 0


def test_the_lens_tells_predictions_from_intermediate_states(server: RunningServer, open_page: Open) -> None:
    page = connected(open_page(server))
    page.fill("#max_tokens", "6")
    page.fill("#seed", "0")
    own_schedule(page, "2-1-2-3")
    generated(page)
    own = page.locator(".text").nth(3)
    own.locator(".token").first.focus()
    answers: list[Any] = []
    page.on("response", lambda response: answers.append(response) if response.url.endswith("/lens") else None)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    token = own.locator(".token").nth(2)
    assert token.get_attribute("aria-pressed") == "true"
    page.wait_for_selector("#lens-said:has-text('4 loops, 2-1-2-3')")
    passes = {answer["trajectory"]: answer["loops"] for answer in (response.json() for response in answers)}
    assert list(passes) == ["1", "2", "4", "2-1-2-3", "8"]

    def titles(row: str) -> list[str]:
        return [" ".join(text.split()) for text in page.locator(f"{row} h4").all_inner_texts()]

    assert titles("#lens-budgets") == [
        f"{title} prediction" for title in ("1 loop", "2 loops", "4 loops", "4 loops, 2-1-2-3", "8 loops")
    ]
    assert titles("#lens-loops") == [*(f"loop {loop} intermediate" for loop in range(1, 8)), "loop 8 prediction"]
    assert "trained to make each of these predictions" in page.inner_text("#lens-budgets-said")
    assert "The others are intermediate states" in page.inner_text("#lens-loops-said")
    for number, loops in enumerate(passes.values()):
        words = page.locator("#lens-budgets li").nth(number).locator(".word").all_text_contents()
        assert words == [row["token"].replace("\n", "⏎") for row in loops[-1]["top"]]
    last = [row.locator("li").last.locator(".word").all_text_contents() for row in page.locator(".guesses").all()]
    assert last[0] == last[1], "the full budget is the largest"
    bold = page.locator(".guess.chosen .word").all_text_contents()
    assert {word.strip() for word in bold} <= {token.text_content()}


def test_the_lens_of_a_model_of_unknown_training_says_so(locked: RunningServer, open_page: Open) -> None:
    page = open_page(locked)
    page.get_by_label("API key").fill("sesame")
    page.keyboard.press("Enter")
    connected(page)

    def hide_training(route: Any) -> None:
        answer = route.fetch().json()
        for loop in answer["loops"]:
            loop["trained"] = None
        route.fulfill(json=answer)

    page.route("**/lens", hide_training)
    page.fill("#max_tokens", "2")
    generated(page)
    assert "Nothing says" in page.inner_text("#lens-budgets-said")
    assert "Nothing says" in page.inner_text("#lens-loops-said")
    assert set(page.locator(".kind").all_inner_texts()) == {""}


def test_perplexity_falls_with_compute(server: RunningServer, open_page: Open) -> None:
    page = connected(open_page(server))
    own_schedule(page, "2-1-1")
    page.click("#measure-go")
    page.wait_for_selector("#curve-said:has-text('175 tokens')")
    rows = [row.locator("td").all_inner_texts() for row in page.locator("#curve-table tbody tr").all()]
    assert [row[0] for row in rows] == [*map(str, range(1, 9)), "2-1-1"]
    perplexity = [float(row[3]) for row in rows]
    assert perplexity[0] > 1.2 * perplexity[1] > 1.2 * perplexity[7] > 12
    assert page.locator("#curve circle").count() == 9
    assert page.locator("#curve .own").count() == 1
    assert "does not start at 0" in (page.locator("#curve").text_content() or "")
    page.uncheck("#own")
    page.click("#measure-go")
    page.wait_for_function("() => document.querySelectorAll('#curve circle').length === 8")
    page.wait_for_selector("#curve-said:has-text('175 tokens')")
    assert page.locator("#curve .own").count() == 0
    page.fill("#text", "a")
    page.click("#measure-go")
    page.wait_for_selector("#text-wrong:has-text('Two tokens')")


def test_a_wrong_field_is_said_at_the_field(server: RunningServer, open_page: Open) -> None:
    page = connected(open_page(server))
    wrong = [("max_tokens", "9999", "at most 512"), ("max_tokens", "1.5", "valid integer"), ("prompt", "", "empty")]
    wrong += [
        ("temperature", "-1", "greater than or equal to 0"),
        ("seed", "1e99", "seed"),
        ("top_p", "0", "greater than 0"),
    ]
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
    page.locator(".text").first.locator(".token").nth(3).wait_for(state="attached")
    with server.stopped_engine():  # so that no text ends before it is stopped
        page.keyboard.press("Escape")
        page.wait_for_selector("#texts-said:has-text('Stopped.')")
        page.wait_for_selector("#stop:disabled")
    assert page.locator(".note").all_inner_texts() == ["Stopped."] * 4, "also those that waited for their turn"
    server.wait_for("num_requests_running", 0)


def test_a_server_that_goes_away_is_missed_and_found_again(server: RunningServer, open_page: Open) -> None:
    page = connected(open_page(server))
    page.context.set_offline(True)
    page.wait_for_selector("#trouble:has-text('does not answer')")
    assert page.inner_text("#state") == "no answer"
    page.click("#go")
    page.wait_for_selector("#texts-said:has-text('The server does not answer.')")
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

    page.fill("#max_tokens", "4")  # in turn, since one runs and one may wait
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
        assert text.locator(".token").all_text_contents() == ["a", "é b"]
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
    for page in (wide, narrow):
        page.fill("#seed", "5")
        generated(page)  # which warms up browser and server, so that the times of the next texts are fair
        generated(page)
        token = page.locator(".text").last.locator(".token").nth(33)
        token.click()
        page.wait_for_selector(f"#lens-said:has-text('“{token.text_content()}”')")
        page.evaluate("document.activeElement.blur()")
    pictures = ((wide, "page.png", "header", "#lens"), (narrow, "page-phone.png", "#lens-title", "#lens"))
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
    assert not page.is_visible(".keys >> nth=0"), "a touch screen has no keyboard"
    page.click("#measure-go")
    page.wait_for_selector("#curve-said:has-text('tokens')")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(int(part) for part in re.findall(r"\d+", dark)) < 60
    boxes = [box for text in page.locator(".text").all() if (box := text.bounding_box())]
    assert len({box["x"] for box in boxes}) == 1

    def tabbed_from(start: str, last: str) -> list[str]:
        """The controls with a name that Tab reaches from one to another."""
        page.focus(start)
        reached: list[str | None] = []
        while not reached or reached[-1] != last:
            page.keyboard.press("Tab")
            focused = "document.activeElement"
            reached.append(page.evaluate(f"{focused}.id || {focused}.getAttribute('role')"))
            assert len(reached) < 40
        return [name for name in reached if name]

    # Every control is reached by Tab, in the order of the page.
    named = tabbed_from("#prompt", "go")
    assert named == ["own", "in-turn", "max_tokens", "temperature", "top_p", "seed", "go"]
    page.check("#own")
    named = tabbed_from("#own", "max_tokens")
    assert named == ["in-turn", "budget", "trajectory", "equal", *["slider"] * 7, "max_tokens"]
