"""The server as clients see it: a real one, in a thread, on a port of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import uvicorn

import relaylm
from relaylm.models.family import Family
from relaylm.models.tokenizer import Text8Tokenizer
from relaylm.serve.app import Settings, create_app
from relaylm.serve.compute import Computer
from relaylm.serve.host import Host
from relaylm.serve.request import Limits
from relaylm.serve.server import Protocol, listen


class Running:
    """A server in a thread."""

    def __init__(self, family: Family, settings: Settings | None = None, **limits: Any) -> None:
        computer = Computer({"tiny": family}, Limits(**limits))
        self.scheduler = computer.scheduler
        app = create_app(Host({"tiny": family}, Limits(**limits), computer), settings or Settings())
        config = uvicorn.Config(app, http=Protocol, log_config=None, ws="none", h11_max_incomplete_event_size=1 << 15)
        self.server, listener = uvicorn.Server(config), listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.thread = threading.Thread(target=self.server.run, args=([listener],))
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def close(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()

    def idle(self) -> bool:
        return not self.scheduler.active and not self.scheduler.waiting

    def settled(self) -> bool:
        """Whether all rows are gone, now or very soon."""
        end = time.monotonic() + 20
        while not self.idle() and time.monotonic() < end:
            time.sleep(0.01)
        return self.idle()


@pytest.fixture(scope="module")
def running(family: Family) -> Iterator[Running]:
    one = Running(family)
    yield one
    one.close()


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for block in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if lines:
            found.append((lines.get("event", ""), json.loads(lines["data"])))
    return found


ASK = {"prompt": "the history of ", "length": 32, "steps": 8, "seed": 3, "schedule": "sandwich:50%", "n": 2}


def sampled(family: Family, batch_size: int, **options: Any) -> list[str]:
    fields = {**ASK, **options}
    schedule, n = fields.pop("schedule"), fields.pop("n")
    return relaylm.sample(family, schedule, n, batch_size=batch_size, **fields).texts


def test_denoise_streams_what_sample_writes(running: Running, family: Family) -> None:
    answer = running.client.post("/v1/denoise", json=ASK)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    assert [name for name, _ in events[:1] + events[-1:]] == ["start", "done"]
    start, done = events[0][1], events[-1][1]
    texts = sampled(family, done["relaylm"]["batch_size"])
    assert done["texts"] == texts
    rows = [list(row) for row in start["given"]]
    for name, event in events[1:-1]:
        assert name == "written" and set(event) == {
            *("row", "positions", "tokens", "texts", "logprobs", "model", "step", "t")
        }
        for position, text in zip(event["positions"], event["texts"], strict=True):
            assert rows[event["row"]][position] is None  # written once, and never what was given
            rows[event["row"]][position] = text
    assert ["".join(row) for row in rows] == texts
    made: dict[str, int] = {}
    for _, event in events[1:-1]:
        made[event["model"]] = made.get(event["model"], 0) + 1
    assert made == done["relaylm"]["calls"] == start["planned"]["calls"]
    assert start["planned"]["flops"] == done["relaylm"]["flops"]
    whole = running.client.post("/v1/denoise", json={**ASK, "stream": False}).json()
    assert whole["texts"] == texts and whole["seed"] == 3


def test_a_seed_is_drawn_and_named(running: Running) -> None:
    ask = {"length": 16, "steps": 4, "stream": False}
    first, second = (running.client.post("/v1/denoise", json=ask).json() for _ in range(2))
    assert first["seed"] != second["seed"]
    again = running.client.post("/v1/denoise", json={**ask, "seed": first["seed"]}).json()
    assert again["texts"] == first["texts"]


def test_completions_cut_and_echo(running: Running, family: Family) -> None:
    ask = {"prompt": ["the ", "history of "], "max_tokens": 12, "n": 2, "seed": 5, "steps": 6, "logprobs": 0}
    answer = running.client.post("/v1/completions", json=ask).json()
    batch = answer["relaylm"]["batch_size"]
    texts = [
        text
        for number, prompt in enumerate(ask["prompt"])  # type: ignore[arg-type]
        for text in relaylm.sample(
            family, n=2, prompt=prompt, max_new_tokens=12, seed=5, steps=6, first_row=2 * number, batch_size=batch
        ).texts
    ]
    written = [
        text.removeprefix(prompt) for text, prompt in zip(texts, ["the "] * 2 + ["history of "] * 2, strict=True)
    ]
    assert [choice["text"] for choice in answer["choices"]] == written
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 4
    assert answer["usage"] == {"prompt_tokens": 15, "completion_tokens": 48, "total_tokens": 63}
    for choice in answer["choices"]:
        scores = choice["logprobs"]
        assert "".join(scores["tokens"]) == choice["text"] and len(scores["token_logprobs"]) == 12
        assert all(value <= 0 for value in scores["token_logprobs"]) and scores["text_offset"] == list(range(12))
    echo = running.client.post("/v1/completions", json={**ask, "echo": True}).json()
    assert [choice["text"] for choice in echo["choices"]] == texts
    assert echo["choices"][0]["logprobs"]["token_logprobs"][:4] == [None] * 4
    stop = written[0][4:6]
    cut = running.client.post("/v1/completions", json={**ask, "stop": [stop]}).json()
    assert cut["choices"][0]["text"] == written[0].split(stop)[0] and cut["choices"][0]["finish_reason"] == "stop"


class EndsInC(Text8Tokenizer):
    """A text ends with a mark of its own, which people read as [end]."""

    eos_id = Text8Tokenizer().encode("c")[0]

    def _text(self, ids: list[int]) -> str:
        return super()._text(ids).replace("c", "<end>")


def test_probabilities_are_those_of_the_text_that_is_given(family: Family) -> None:
    """Under every way to cut and to frame a text its tokens stand where `text_offset` says, in full and no further."""
    one = Running(replace(family, tokenizer=EndsInC()))
    ask = {"max_tokens": 20, "n": 3, "seed": 8, "steps": 5, "logprobs": 1}
    try:
        free = one.client.post("/v1/completions", json=ask).json()["choices"]
        assert "<end>" in free[0]["text"]
        stop = re.search("[a-z]{2}", free[0]["text"].replace("<end>", " "))[0]  # type: ignore[index]
        frames: list[dict[str, Any]] = [{}, {"prompt": f"to {stop} "}, {"prompt": "the ", "suffix": " of it"}]
        for more in [*frames, {"infill": "so ____ of the __ c", "max_tokens": None}]:
            for cut in ({}, {"echo": True}, {"stop": stop}, {"stop": [stop, " "], "echo": True}):
                for choice in one.client.post("/v1/completions", json={**ask, **more, **cut}).json()["choices"]:
                    text, scores = choice["text"], choice["logprobs"]
                    places = list(zip(scores["text_offset"], scores["tokens"], scores["token_logprobs"], strict=True))
                    assert all(text.startswith(token[: len(text) - at], at) for at, token, _ in places)
                    assert all(at < len(text) for at, *_ in places)
                    given = [score for *_, score in places if score is None]
                    prompt = more.get("prompt", "") if "echo" in cut and "infill" not in more else ""
                    if "infill" in more:
                        assert text.startswith("so ") and (not given or cut.get("echo"))
                    else:  # nothing is left out, and a stop in the prompt is none
                        assert "".join(token for _, token, _ in places).startswith(text)
                        assert text.startswith(prompt) and len(given) == len(prompt)
    finally:
        one.close()


def test_streamed_completions_add_up(running: Running) -> None:
    ask = {"prompt": "the ", "max_tokens": 20, "n": 3, "seed": 5, "steps": 10, "schedule": "sandwich:50%"}
    whole = running.client.post("/v1/completions", json=ask).json()
    for stop in (None, whole["choices"][1]["text"][7:10]):
        fields = {**ask, "stop": stop}
        whole = running.client.post("/v1/completions", json=fields).json()
        blocks = running.client.post("/v1/completions", json={**fields, "stream": True}).text.strip().split("\n\n")
        assert blocks.pop() == "data: [DONE]"
        texts, reasons = [""] * 3, [None] * 3
        chunks = [json.loads(block.removeprefix("data: ")) for block in blocks]
        assert [chunk for chunk in chunks if "relaylm" in chunk] == chunks[-1:] and all(c["choices"] for c in chunks)
        for chunk in chunks:
            for choice in chunk["choices"]:
                assert reasons[choice["index"]] is None
                texts[choice["index"]] += choice["text"]
                reasons[choice["index"]] = choice["finish_reason"]
        assert texts == [choice["text"] for choice in whole["choices"]]
        assert reasons == [choice["finish_reason"] for choice in whole["choices"]]


def test_a_stop_that_later_text_makes_longer_is_not_sent(running: Running) -> None:
    """Of stops that overlap the one that begins first counts, even if it is the last to be complete: letters of it must
    not have been sent because a shorter one was found in it."""
    ask = {"prompt": "the ", "max_tokens": 20, "steps": 20, "n": 2, "schedule": "light"}
    for seed in range(4):
        free = running.client.post("/v1/completions", json={**ask, "seed": seed}).json()["choices"]
        text = free[0]["text"]
        for at in (3, 9):
            for stop in ([text[at + 1], text[at : at + 6]], [text[at : at + 8], text[at + 2 : at + 4]]):
                fields = {**ask, "seed": seed, "stop": stop}
                whole = running.client.post("/v1/completions", json=fields).json()["choices"]
                assert whole[0]["text"] == text[: min(text.index(one) for one in stop)]
                blocks = running.client.post("/v1/completions", json={**fields, "stream": True}).text.split("\n\n")
                sent, reasons = ["", ""], ["", ""]
                for choice in (c for block in blocks[:-2] for c in json.loads(block[6:])["choices"]):
                    sent[choice["index"]] += choice["text"]
                    reasons[choice["index"]] = choice["finish_reason"]
                assert sent == [choice["text"] for choice in whole]
                assert reasons == [choice["finish_reason"] for choice in whole]


def test_no_text_after_a_stop_is_ever_sent() -> None:
    """As letters come one by one, all that was sent is a beginning of what remains in the end."""
    from relaylm.serve.completions import Completion
    from relaylm.serve.request import Ask

    for text, stop, wanted in (
        ("one, two; three", (",", "ne, two;"), "o"),
        ("one, two; three", ("ne, two!", ","), "one"),
        ("aaaaab", ("aaab", "b"), "aa"),
        ("caf\u00e9 au lait", ("\u00e9 au", "u"), "caf"),
    ):
        start = {"id": "x", "family": "tiny", "leads": [0]}
        completion, sent = Completion(Ask(stop=stop, stream=True), start), ""
        done = {"completions": [text], "usage": {}, "relaylm": {}}
        for end in range(len(text) + 1):
            # half of a character of two bytes is not known yet
            finished = text[:end] + ("\ufffd" if text[end : end + 1] > "\x7f" else "")
            completion.take("written", {"row": 0, "positions": [], "logprobs": [], "finished": finished})
            sent += "".join(chunk["choices"][0]["text"] for chunk in completion.chunks())
            assert wanted.startswith(sent)
        completion.take("done", done)
        *_, last = completion.chunks()
        assert sent + last["choices"][0]["text"] == wanted == completion.body()["choices"][0]["text"]
        assert last["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("rule", ["remdm-cap:0.3", "remdm-conf", "low-confidence", None])
def test_a_stream_never_takes_text_back(running: Running, rule: str | None) -> None:
    """Rules that mask positions again write another token there, so nothing can be sent before the end."""
    for seed in range(8):
        ask = {"prompt": "the ", "max_tokens": 24, "steps": 8, "seed": seed, "rule": rule, "echo": seed % 2 == 0}
        whole = running.client.post("/v1/completions", json=ask).json()["choices"][0]["text"]
        blocks = running.client.post("/v1/completions", json={**ask, "stream": True}).text.strip().split("\n\n")
        assert "".join(json.loads(block[6:])["choices"][0]["text"] for block in blocks[:-1]) == whole


def test_the_openai_client_works(running: Running, family: Family) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    ask = {
        "model": "tiny",
        "prompt": "the ",
        "max_tokens": 12,
        "seed": 1,
        "extra_body": {"schedule": "L50% H50%", "spacing": 3},
    }
    whole = client.completions.create(**ask)
    text = relaylm.sample(
        family, "L50% H50%", prompt="the ", max_new_tokens=12, seed=1, spacing=3, batch_size=whole.relaylm["batch_size"]
    ).texts[0]
    assert "the " + whole.choices[0].text == text and whole.usage.completion_tokens == 12
    chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == 12 and not chunks[-1].choices
    chunks = list(client.completions.create(**ask, stream=True))  # now all chunks have a choice
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].relaylm["calls"] == whole.relaylm["calls"]
    with pytest.raises(openai.BadRequestError, match="best_of"):
        client.completions.create(**ask, best_of=3)


def test_models_and_schedules_are_described(running: Running, family: Family) -> None:
    entry = running.client.get("/v1/models").json()["data"][0]
    assert entry == running.client.get("/v1/models/tiny").json()
    about = entry["relaylm"]
    assert [about["light"], about["heavy"], about["length"]] == ["1b", "3b", 32]
    assert [model["blocks"] for model in about["models"]] == [1, 3]
    ask = {"schedule": "L25% H75%", "steps": 8}
    found = running.client.get("/v1/schedule", params=ask).json()
    assert found["schedule"] == "1b:25% 3b:75%" and found["law"] == "uniform:8"
    assert found["segments"] == [{"model": "1b", "share": 0.25}, {"model": "3b", "share": 0.75}]
    cost = relaylm.sample(family, **ask, n=400).cost
    assert found["calls"]["3b"] == pytest.approx(cost.calls["3b"] / 400, rel=0.05)
    assert found["saved"] == pytest.approx(cost.flops_saved, rel=0.05)
    spaced = running.client.get("/v1/schedule", params={"schedule": "sandwich:50%", "spacing": "4"}).json()
    assert spaced["law"] == "spaced:4" and sum(part["share"] for part in spaced["segments"]) == pytest.approx(1)
    wrong = running.client.get("/v1/schedule", params={"schedule": "L25% H70%"})
    assert wrong.status_code == 400 and "100%" in wrong.json()["error"]["message"]


def test_a_family_may_be_called_as_on_a_hub(family: Family) -> None:
    host = Host({"owner/tiny": family})
    app = httpx.ASGITransport(create_app(host, Settings()))

    async def get(path: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=app, base_url="http://here") as client:
            return await client.get(path)

    assert asyncio.run(get("/v1/models/owner/tiny")).json()["id"] == "owner/tiny"
    assert asyncio.run(get("/v1/models/owner%2Ftiny")).json()["id"] == "owner/tiny"
    assert asyncio.run(get("/v1/models/owner/other")).json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", {"POST"}),
        ("GET", "/v1/denoise", {"POST"}),
        ("OPTIONS", "/v1/denoise", {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("DELETE", "/v1/models/tiny", {"GET", "HEAD"}),
        ("PUT", "/v1/schedule", {"GET", "HEAD"}),
        ("POST", "/health", {"GET", "HEAD"}),
        ("POST", "/", {"GET", "HEAD"}),
    ],
)
def test_a_wrong_method_is_told_the_right_one(running: Running, method: str, path: str, allowed: set[str]) -> None:
    answer = running.client.request(method, path)
    assert answer.status_code == 405 and set(answer.headers["allow"].split(", ")) == allowed
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "code", "param"} and error["type"] == "invalid_request_error"
    assert error["code"] == "method_not_allowed" and all(name in error["message"] for name in {method, *allowed})


@pytest.mark.parametrize("path", ["/v1/", "/v1/nothing", "/v1/models/", "/v1/completions/", "/nothing"])
def test_what_is_not_there_is_not_found(running: Running, path: str) -> None:
    for method in ("GET", "POST"):
        answer = running.client.request(method, path)
        if method == "GET" or path.startswith("/v1/"):
            assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"


def test_refusals_name_the_fields_that_were_sent(running: Running) -> None:
    for ask in ({"max_tokens": 1000}, {"prompt": "the ", "max_tokens": 31}, {"infill": "a _", "max_tokens": 1}):
        answer = running.client.post("/v1/completions", json=ask)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "max_tokens"
        assert "max_tokens" in error["message"] and "max_new_tokens" not in error["message"]
    error = running.client.post("/v1/completions", json={"infill": "a _", "suffix": "b"}).json()["error"]
    assert error["param"] is None and "suffix" in error["message"]


@pytest.mark.parametrize("number", ["1e39", "1e-40", "1e400", "-1e400", "-1", "1" + "0" * 400, "true"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/denoise"])
def test_a_temperature_beyond_32_bits_is_refused(running: Running, path: str, number: str) -> None:
    """Logits divided by it would be infinite, or all alike."""
    kind = {"content-type": "application/json"}
    answer = running.client.post(path, content=f'{{"steps": 4, "temperature": {number}}}', headers=kind)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["message"].startswith("temperature must be ")
    assert error["param"] == "temperature"


@pytest.mark.parametrize("temperature", [1e-30, 1e6])
def test_the_least_and_the_largest_temperature_are_served(running: Running, family: Family, temperature: float) -> None:
    answer = running.client.post("/v1/denoise", json={**ASK, "temperature": temperature, "stream": False}).json()
    assert answer["texts"] == sampled(family, answer["relaylm"]["batch_size"], temperature=temperature)


def test_an_upgraded_server_shows_its_own_page(running: Running) -> None:
    """Browsers ask each time, and get a short answer where nothing has changed."""
    for path in ("/", "/main.js", "/style.css", "/show/renderer.js", "/icon.svg"):
        answer = running.client.get(path)
        assert answer.headers["cache-control"] == "no-cache"
        again = running.client.get(path, headers={"if-none-match": answer.headers["etag"]})
        assert again.status_code == 304 and not again.content and again.headers["cache-control"] == "no-cache"
        assert running.client.get(path, headers={"if-none-match": '"older"'}).content == answer.content
    assert running.client.get("/player.html").headers["cache-control"] == "no-cache"


def test_health_metrics_and_headers(running: Running) -> None:
    before = running.client.get("/metrics").text
    running.client.post("/v1/denoise", json={**ASK, "stream": False})
    health = running.client.get("/health").json()
    assert health["status"] == "ok"

    def value(text: str, name: str) -> float:
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    after = running.client.get("/metrics").text
    assert value(after, "relaylm_tokens_total") - value(before, "relaylm_tokens_total") == 2 * 17
    assert value(after, "relaylm_requests_total") - value(before, "relaylm_requests_total") == 1
    page = running.client.get("/")
    assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]


def test_the_log_says_what_a_request_cost(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    def noted() -> list[dict[str, Any]]:  # a line is written after its answer, so others may be among them
        lines = [vars(record)["facts"] for record in caplog.records]
        return [facts for facts in lines if facts["path"] == "/v1/denoise"]

    with caplog.at_level(logging.INFO, "relaylm.serve"):
        answers = [running.client.post("/v1/denoise", json={**ASK, "stream": stream}) for stream in (False, True)]
        until = time.monotonic() + 20
        while len(noted()) < 2 and time.monotonic() < until:
            time.sleep(0.01)
    for facts, answer in zip(noted(), answers, strict=True):
        about = json.loads(answer.text.strip().split("data: ")[-1])["relaylm"]
        assert facts["status"] == 200 and facts["rows"] == 2
        assert facts["calls"] == about["calls"] and facts["flops"] == about["flops"]
        assert ASK["prompt"] not in str(facts)
    assert ASK["prompt"] not in caplog.text


def test_prompts_are_in_the_log_where_that_is_asked_for(family: Family, caplog: pytest.LogCaptureFixture) -> None:
    one = Running(family, Settings(log_prompts=True))
    try:
        with caplog.at_level(logging.INFO, "relaylm.serve"):
            assert one.client.post("/v1/denoise", json={**ASK, "stream": False}).status_code == 200
            assert one.client.post("/v1/denoise", json={**ASK, "prompt": "?", "steps": 0}).status_code == 400
    finally:
        one.close()
    bodies = [vars(record)["facts"]["body"] for record in caplog.records]
    assert [body["prompt"] for body in bodies] == [ASK["prompt"], "?"]


def test_who_takes_too_long_is_told_so(family: Family) -> None:
    one = Running(family, timeout=0.01)
    try:
        for path, length in (("/v1/denoise", "length"), ("/v1/completions", "max_tokens")):
            ask = {length: 32, "steps": "inf", "n": 64}
            whole = one.client.post(path, json={**ask, "stream": False})
            assert whole.status_code == 504 and whole.json()["error"]["code"] == "timeout"
            streamed = one.client.post(path, json={**ask, "stream": True})
            last = streamed.text.strip().split("data: ")[-1]
            assert streamed.status_code == 200 and json.loads(last)["error"]["code"] == "timeout"
        assert one.settled()
    finally:
        one.close()


def test_the_key_is_needed_where_there_is_one(family: Family) -> None:
    one = Running(family, Settings(api_key="sésame"))
    try:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": b"Bearer \xff\xfe"}):
            answer = one.client.post("/v1/denoise", json=ASK, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
            assert one.client.get("/metrics", headers=headers).status_code == 401
        assert one.client.get("/health").status_code == 200
        for scheme in ("Bearer", "bearer"):
            good = {"authorization": f"{scheme} sésame".encode()}
            assert one.client.post("/v1/denoise", json=ASK, headers=good).status_code == 200
    finally:
        one.close()


def test_too_much_is_refused_with_a_time_to_try_again(family: Family) -> None:
    one = Running(family, max_rows=1, max_queue=2)
    try:
        large = {"length": 32, "steps": "inf", "n": 2, "schedule": "heavy"}
        answers = []

        def post() -> None:
            answers.append(one.client.post("/v1/denoise", json={**large, "stream": False}))

        threads = [threading.Thread(target=post) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {answer.status_code for answer in answers} == {200, 429}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status_code == 429)
        never = one.client.post("/v1/denoise", json={**large, "n": 3})
        assert never.status_code == 400 and never.json()["error"]["param"] == "n"
        assert one.settled()
    finally:
        one.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_takes_its_rows_along(family: Family, stream: bool) -> None:
    one, long = Running(family, batch_size=1), {"length": 32, "steps": "inf", "n": 250, "stream": stream}
    try:
        if stream:
            with one.client.stream("POST", "/v1/denoise", json=long) as answer:
                lines = answer.iter_lines()
                while "written" not in next(lines):
                    pass
        else:
            with pytest.raises(httpx.ReadTimeout):
                one.client.post("/v1/denoise", json=long, timeout=0.3)
        assert one.settled() and one.scheduler.calls < 250 * 32 / 2
    finally:
        one.close()


def test_shutdown_finishes_what_runs(family: Family) -> None:
    one = Running(family)
    with one.client.stream("POST", "/v1/denoise", json={**ASK, "steps": 32, "n": 16}) as answer:
        lines = answer.iter_lines()
        next(lines)
        one.server.should_exit = True
        rest = "\n".join(lines)
    assert "event: done" in rest
    one.close()
