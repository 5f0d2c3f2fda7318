"""Admission to the live page, with a real server and a plain client."""

from __future__ import annotations

import hmac

import aiohttp

from decoupled_diloco.show.page.site import ATTEMPT_SECONDS, ATTEMPTS_MAX, PASS_SECONDS
from decoupled_diloco.transport.tokens import Tokens
from unit.show.served import Wall, browser, quiet, served

SECRET = "correct horse"


async def status(session: aiohttp.ClientSession, url: str, **options: object) -> int:
    async with session.get(url, allow_redirects=False, **options) as answer:  # type: ignore[arg-type]
        return answer.status


async def sign_in(session: aiohttp.ClientSession, address: str, secret: str) -> int:
    url = f"{address}/page/sign-in"
    async with session.post(url, data={"secret": secret}, allow_redirects=False) as answer:
        return answer.status


async def test_signing_in_once_is_enough_and_the_cookie_is_not_the_secret() -> None:
    async with served(Tokens(SECRET), feed=quiet()) as address, browser() as session:
        assert await status(session, f"{address}/") == 401
        assert await status(session, f"{address}/page/events") == 401
        assert await sign_in(session, address, "wrong") == 401
        assert await status(session, f"{address}/") == 401
        assert await sign_in(session, address, f" {SECRET}\n") == 303
        assert await status(session, f"{address}/") == 200
        [cookie] = session.cookie_jar
        assert SECRET not in cookie.value
        assert cookie["httponly"]
        assert cookie["samesite"] == "Strict"


async def test_a_pass_survives_a_restart_and_expires_with_the_secret_and_with_time() -> None:
    wall = Wall()
    async with browser() as session:
        async with served(Tokens(SECRET), wall, quiet()) as address:
            await sign_in(session, address, SECRET)
            [cookie] = session.cookie_jar
        value = {"Cookie": f"ddiloco-PORT={cookie.value}"}
    for tokens, later, expected in (
        (Tokens(SECRET), 0.0, 200),
        (Tokens("another"), 0.0, 401),
        (Tokens(SECRET), PASS_SECONDS + 1.0, 401),
    ):
        now = Wall()
        now.seconds += later
        async with served(tokens, now, quiet()) as address, browser() as session:
            port = address.rpartition(":")[2]
            headers = {"Cookie": value["Cookie"].replace("PORT", port)}
            assert await status(session, f"{address}/", headers=headers) == expected


async def test_a_modified_pass_is_invalid() -> None:
    async with served(Tokens(SECRET), feed=quiet()) as address, browser() as session:
        await sign_in(session, address, SECRET)
        [cookie] = session.cookie_jar
        until, _, code = cookie.value.partition(".")
        port = address.rpartition(":")[2]
        for forged in (f"{int(until) + 1}.{code}", f"{until}.", f"{until}.{'0' * 64}", "é.x", ""):
            headers = {"Cookie": f"ddiloco-{port}={forged}"}
            async with browser() as other:
                assert await status(other, f"{address}/", headers=headers) == 401


async def test_wrong_secrets_are_limited_and_expire_over_time() -> None:
    wall = Wall()
    async with served(Tokens(SECRET), wall, quiet()) as address, browser() as session:
        for _ in range(ATTEMPTS_MAX):
            assert await sign_in(session, address, "guess") == 401
        assert await sign_in(session, address, "guess") == 429
        assert await sign_in(session, address, SECRET) == 429
        wall.seconds += 2 * ATTEMPT_SECONDS
        assert await sign_in(session, address, SECRET) == 303


async def test_the_secret_of_any_principal_is_accepted() -> None:
    tokens = Tokens(principals={"learner-0": "a", "learner-1": "b"})
    async with served(tokens, feed=quiet()) as address, browser() as session:
        assert await sign_in(session, address, "c") == 401
        assert await sign_in(session, address, "b") == 303
        assert await status(session, f"{address}/") == 200


async def test_other_sites_and_other_host_names_are_rejected() -> None:
    async with served(Tokens(), feed=quiet()) as address, browser() as session:
        assert await status(session, f"{address}/") == 200
        elsewhere = {"Origin": "http://evil.example"}
        assert await status(session, f"{address}/page/events", headers=elsewhere) == 403
        rebound = {"Host": "evil.example:80"}
        assert await status(session, f"{address}/", headers=rebound) == 403
        assert await status(session, f"{address}/run", headers={"Origin": address}) == 403


async def test_files_are_served_strictly_and_nothing_else_is() -> None:
    async with served(Tokens(SECRET), feed=quiet()) as address, browser() as session:
        for name in ("page.css", "live.css", "live.js", "colors.css", "icon.svg"):
            async with session.get(f"{address}/page/{name}") as answer:
                assert answer.status == 200
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert "http" not in (await answer.text()).replace("http://www.w3.org/2000/svg", "")
        for path in ("/page/%2e%2e%2fsite.py", "/page/index.html", "/page/"):
            assert await status(session, f"{address}{path}") in (403, 404)
        async with session.post(f"{address}/") as answer:
            assert answer.status == 405


async def test_other_shards_redirect_to_shard_0_at_the_dialed_host() -> None:
    tokens, first = Tokens(SECRET), "http://0.0.0.0:7070"
    async with (
        served(tokens, first=first) as address,
        browser() as session,
        session.get(f"{address}/", allow_redirects=False) as answer,
    ):
        assert answer.status == 303
        assert answer.headers["Location"] == "http://127.0.0.1:7070/"


async def test_a_forged_pass_is_rejected_if_certificates_decide() -> None:
    """Without a secret the key of the passes is not secret either."""
    tokens = Tokens(certificates=True)
    until = str(int(Wall()() + PASS_SECONDS))
    code = hmac.new(tokens.derived_key(b"the live page"), until.encode(), "sha256").hexdigest()
    async with served(tokens, feed=quiet()) as address, browser() as session:
        port = address.rpartition(":")[2]
        headers = {"Cookie": f"ddiloco-{port}={until}.{code}"}
        for path in ("/", "/page/events"):
            assert await status(session, f"{address}{path}", headers=headers) == 401
        assert await sign_in(session, address, "anything") == 401


async def test_a_secret_is_not_enough_if_a_certificate_is_also_required() -> None:
    tokens = Tokens(SECRET, certificates=True)
    async with served(tokens, feed=quiet()) as address, browser() as session:
        assert await sign_in(session, address, SECRET) == 401
