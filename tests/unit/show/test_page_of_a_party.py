"""The page and the documents of a shard, as a party sees them."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import pytest

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.signing_keys import PublicKey
from decoupled_diloco.launch.shard_role import ShardRole
from decoupled_diloco.show.page.feed import Feed
from decoupled_diloco.show.page.site import SIGN_IN, Access, Site
from decoupled_diloco.tape.sources import TAPE_PATH
from decoupled_diloco.transport.documents import Document
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.tokens import RequestRefusal, Tokens
from unit.show.served import browser, no_channel, quiet

TOKENS = {"hospital-a": "secret of a", "operator": "secret of the operator"}


def role(tmp_path: Path) -> ShardRole:
    members = [
        {"name": name, "learners": [f"{name}-*"], "key": str(PublicKey(name[-1].encode() * 32))}
        for name in ("hospital-a", "hospital-b")
    ]
    config = RunConfig(run={"max_steps": 1}, privacy={"members": members})

    def absent(*_: object) -> None:
        raise AssertionError("nothing is started")

    return ShardRole(config, 0, (), tmp_path, False, absent, absent, absent)  # type: ignore[arg-type]


def test_a_party_gets_its_lines_of_a_tape_and_no_metrics(tmp_path: Path) -> None:
    lines = b"".join(
        json.dumps({"process": "shard-0", "data": {"learner": name}}).encode() + b"\n"
        for name in ("hospital-a-0", "hospital-b-0")
    )
    piece, shard = Document(lines, {"next": "1"}), role(tmp_path)
    assert shard.restricted((), TAPE_PATH, piece) == piece
    assert shard.restricted(("operator",), "/metrics", piece) == piece
    own = shard.restricted(("hospital-a",), TAPE_PATH, piece)
    assert b"hospital-a-0" in own.body
    assert b"hospital-b" not in own.body
    with pytest.raises(RequestRefusal, match="party 'hospital-a' sees its own learners only"):
        shard.restricted(("hospital-a-0",), "/metrics", piece)


async def test_a_pass_names_its_viewer_and_cannot_name_another() -> None:
    seen: list[tuple[str, ...]] = []

    def feed_of(names: tuple[str, ...]) -> Feed:
        seen.append(names)
        return feeds[-1]

    feeds = [quiet()]
    tokens = Tokens(principals=TOKENS)
    site = Site(Access(tokens), feed_of, "http://h:1", lambda: {"how": "stopped"})
    server = HttpServer(tokens=tokens, on_channel=no_channel, website=site)
    await server.start()
    try:
        async with browser() as client:
            form = {"secret": "secret of a"}
            async with client.post(server.address + SIGN_IN, data=form, allow_redirects=False):
                pass
            async with client.get(f"{server.address}/page/events") as answer:
                assert answer.status == 200
            (cookie,) = client.cookie_jar
            forged = cookie.value.removesuffix("hospital-a") + "operator"
        async with (
            aiohttp.ClientSession(cookies={cookie.key: forged}) as client,
            client.get(f"{server.address}/page/events") as answer,
        ):
            assert answer.status == 401
    finally:
        await server.stop()
    assert seen == [("hospital-a",)]


async def test_a_query_is_answered_for_the_name_of_its_token() -> None:
    answered = []

    async def document(query: object) -> Document:
        answered.append(query)
        return Document(b"everything")

    def restrict(proved: tuple[str, ...], path: str, found: Document) -> Document:
        if proved == ("hospital-a",) and path == "/whole":
            raise RequestRefusal(403, "a part only")
        return Document(b"a part") if proved == ("hospital-a",) else found

    server = HttpServer(
        tokens=Tokens(principals=TOKENS),
        on_channel=no_channel,
        queries={"/document": document, "/whole": document},
        restrict=restrict,
    )
    await server.start()
    try:
        answers: list[bytes | int] = []
        async with aiohttp.ClientSession() as client:
            for token in TOKENS.values():
                headers = {"Authorization": f"Bearer {token}"}
                async with client.get(f"{server.address}/document", headers=headers) as answer:
                    answers.append(await answer.read())
                async with client.get(f"{server.address}/whole", headers=headers) as answer:
                    answers.append(await answer.read() if answer.status == 200 else answer.status)
    finally:
        await server.stop()
    assert answers == [b"a part", 403, b"everything", b"everything"]
    assert len(answered) == 3, "what is refused does not begin"


async def test_an_order_needs_a_post_that_no_website_can_send() -> None:
    """A browser sends Origin with each POST, and an image of another site is a GET."""
    given: list[tuple[str, ...]] = []

    async def order(names: tuple[str, ...]) -> Document:
        given.append(names)
        return Document(b"done")

    server = HttpServer(
        tokens=Tokens(principals=TOKENS), on_channel=no_channel, orders={"/order": order}
    )
    await server.start()
    try:
        own = {"Authorization": f"Bearer {TOKENS['hospital-a']}"}
        statuses = []
        async with aiohttp.ClientSession(server.address) as client:
            for method, headers in (
                ("POST", own),
                ("GET", own),
                ("POST", {}),
                ("POST", {**own, "Origin": "https://other.example"}),
            ):
                async with client.request(method, "/order", headers=headers) as answer:
                    statuses.append(answer.status)
    finally:
        await server.stop()
    assert statuses == [200, 400, 401, 403]
    assert given == [("hospital-a",)]
