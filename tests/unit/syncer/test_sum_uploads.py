"""A shard expects sums from relays, and checks them against what it has ordered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco.errors import MergeError
from decoupled_diloco.merge import body_digest
from decoupled_diloco.merge.accumulate import Accumulator
from decoupled_diloco.merge.sum_payload import write_sum
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import Asking
from decoupled_diloco.relay.sum_worker import KeptResiduals, RelayTensors
from decoupled_diloco.runtime import Runtime, within
from decoupled_diloco.syncer.shard_tensors import ShardTensors
from decoupled_diloco.syncer.sum_uploads import Sums, sum_path
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.transport.payload_store import BodyBooks
from decoupled_diloco.transport.pool import ReceivePool
from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.virtual_disk import Loss, SimulatedDisk, remains, write_folder
from unit.plans import plan_of

N = 12
ASKS = (Asking(1, 1), Asking(1, 2))
_T = TypeVar("_T")


class Shard:
    """A shard that has ordered a relay to fold two contributions of length 1."""

    def __init__(self, method: str = "rda") -> None:
        self.plan = plan_of(nn.Linear(4, 3, bias=False), "fp32", method)
        self.tensors = ShardTensors(self.plan, (0,))
        self.bodies = BodyBooks(ReceivePool(1 << 20), Limits())
        self.facts: list[Any] = []
        self.stopped = False
        self.tasks: list[asyncio.Task[None]] = []
        self.sums = Sums(
            self.tensors, self.bodies, cast(Any, self), self, lambda *_: None, checks=True
        )
        self.sums.begin("site-a", "c", [0])
        for ask in ASKS:
            self.tensors.reported(0, ask, 1.0)
            self.tensors.folded_at_relay(0, ask, 2.0, 20.0, 1.0, 1.0)

    def deliver(self, fact: Any) -> None:
        self.facts.append(fact)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.ensure_future(work))
        return self.tasks[-1]

    async def run(self, task: Callable[[], _T]) -> _T:
        return task()

    def sum_of(self, vectors: list[Tensor], weight: float) -> tuple[Tensor, str]:
        accumulator = self.plan.accumulator(0)
        assert isinstance(accumulator, Accumulator)
        for vector in vectors:
            accumulator.add(vector, weight)
        body, digest, _ = write_sum(self.plan, 0, accumulator, ())
        return body, digest

    async def arrives(self, body: Tensor, digest: str, number: int = 1) -> Any:
        """The relay announces and sends a sum; return what the machine receives."""
        self.sums.announce("c", messages.Sum(0, number, ASKS, digest))
        key = sum_path("site-a", "c", 0, number).removeprefix("/")
        stream = self.bodies.open(key, "site-a", (0, len(body)), len(body), take_over=False)
        async with stream.receiving():
            stream.write(body.numpy().tobytes())
        for _ in range(10):
            await asyncio.sleep(0)
        await asyncio.gather(*self.tasks)
        return self.facts.pop()


def unit(direction: int) -> Tensor:
    vector = torch.zeros(N)
    vector[direction] = 1.0
    return vector


@pytest.mark.parametrize("method", ["rda", "mean"])
async def test_a_sum_of_what_was_ordered_is_accepted(method: str) -> None:
    shard = Shard(method)
    fact = await shard.arrives(*shard.sum_of([unit(0), unit(1)], 200.0))
    assert isinstance(fact, messages.SumArrived)
    assert fact.asks == ASKS
    shard.tensors.fold_sum(0, ("site-a", 1))
    assert shard.tensors._accumulators[0][""].count == 2  # type: ignore[attr-defined]


async def test_a_sum_with_another_weight_is_rejected() -> None:
    """A relay could otherwise give its site any influence."""
    shard = Shard()
    fact = await shard.arrives(*shard.sum_of([unit(0), unit(1)], 2e6))
    assert isinstance(fact, messages.SumCorrupt)
    assert "weight 4e+06, but 400 was ordered" in fact.reason


async def test_a_sum_with_another_count_is_rejected() -> None:
    shard = Shard()
    fact = await shard.arrives(*shard.sum_of([unit(0)], 400.0))
    assert "1 contributions, but names 2" in fact.reason


@pytest.mark.parametrize("method", ["rda", "mean"])
async def test_a_sum_of_larger_changes_than_reported_is_rejected(method: str) -> None:
    shard = Shard(method)
    fact = await shard.arrives(*shard.sum_of([50 * unit(0), 50 * unit(0)], 200.0))
    kind = "norms of 20000, but" if method == "rda" else "length 20000, but at most"
    assert f"{kind} 400 was reported" in fact.reason


class Site:
    """A relay with error feedback, and the shard that checks its sums."""

    def __init__(self, codec: str, method: str, folder: Path) -> None:
        self.folder = folder
        model = nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24), nn.Linear(24, 8))
        self.plan = plan_of(model, codec, method, feedback=1.0)
        self.shard = ShardTensors(self.plan, (0,))
        self.sums = 0
        self._asks = 0
        self.restart()

    def restart(self, run: str = "run") -> None:
        """Start the relay's process again, with what is on its disk."""
        self.relay = RelayTensors(self.plan, KeptResiduals(self.folder, run))

    def sends(
        self, vectors: list[Tensor], tokens: float, larger: float = 1.0, killed: bool = False
    ) -> Tensor:
        """The relay sends a sum; a dishonest one makes it ``larger`` than ordered.

        Returns:
            The sums that the shard has received, [N].
        """
        wire, asks = self.plan.uplink_of(0), []
        self.sums += 1
        for vector in vectors:
            self._asks += 1
            asks.append(ask := Asking(1, self._asks))
            body = wire.encode(vector)
            norm = self.relay.verify(0, ask, body, body_digest(body, wire))
            self.relay.fold(0, ask, 2.0, tokens)
            self.shard.reported(0, ask, norm)
            self.shard.folded_at_relay(0, ask, 2.0, tokens, 1.0, 1.0)
        self.relay._accumulators[0][""].state_dict()["sums"].mul_(larger)  # type: ignore[attr-defined]
        body, digest = self.relay.take_sum(0, self.sums)
        try:
            self.shard.verify_sum(0, ("site-a", self.sums), body, digest)
            self.shard.check_sum(0, ("site-a", self.sums), asks)
        except MergeError:
            self.relay.settle(0, self.sums, "invalid")
            raise
        if not killed:
            self.relay.settle(0, self.sums, "merged")
        arrived = self.shard._sums[0, ("site-a", self.sums)]  # type: ignore[attr-defined]
        return arrived.state_dict()["sums"]


@pytest.mark.parametrize("method", ["rda", "mean"])
@pytest.mark.parametrize("codec", ["int4", "int2", "topk"])
def test_sums_with_error_feedback_are_accepted(codec: str, method: str, tmp_path: Path) -> None:
    """Also one light contribution after heavy ones, whose residuals it carries."""
    site, rng = Site(codec, method, tmp_path), torch.Generator().manual_seed(2)
    numel = site.plan.fragments[0].numel
    for _ in range(20):
        for count, tokens in ((8, 100.0), (1, 10.0), (1, 10.0), (2, 50.0)):
            drawn = [1e-3 * torch.randn(numel, generator=rng) for _ in range(count)]
            site.sends(drawn, tokens)


def test_after_an_invalid_sum_a_relay_sends_valid_ones(tmp_path: Path) -> None:
    """Its residual is dropped, because it may be what made the sum invalid."""
    site, rng = Site("int4", "mean", tmp_path), torch.Generator().manual_seed(2)
    drawn = [torch.randn(site.plan.fragments[0].numel, generator=rng) for _ in range(4)]
    site.sends(drawn, 10.0)
    with pytest.raises(MergeError, match="was reported"):
        site.sends(drawn, 10.0, larger=1000.0)
    for _ in range(3):
        site.sends(drawn, 10.0)


def test_a_relay_with_error_feedback_cannot_enlarge_a_sum(tmp_path: Path) -> None:
    site, rng = Site("int4", "mean", tmp_path), torch.Generator().manual_seed(2)
    drawn = [torch.randn(site.plan.fragments[0].numel, generator=rng)] * 4
    site.sends(drawn, 10.0)
    with pytest.raises(MergeError, match="was reported"):
        site.sends(drawn, 10.0, larger=10.0)


def left_out(site: Site) -> Tensor:
    """What the next sum will contain in addition, [N]."""
    held = site.relay.residuals.take(0, site.plan.fragments[0].numel)
    site.relay.residuals.keep(0, held)
    return held[0] if held else torch.zeros(site.plan.fragments[0].numel)


def contributions(site: Site, count: int, seed: int) -> list[Tensor]:
    rng, numel = torch.Generator().manual_seed(seed), site.plan.fragments[0].numel
    return [torch.randn(numel, generator=rng) for _ in range(count)]


def test_a_relay_that_restarts_sends_what_it_had_left_out(tmp_path: Path) -> None:
    site, exact, sent = Site("int2", "mean", tmp_path), torch.zeros(()), torch.zeros(())
    wire, numel = site.plan.uplink_of(0), site.plan.fragments[0].numel
    for seed in range(4):
        vectors = contributions(site, 3, seed)
        received = [wire.decode(wire.encode(vector), numel) for vector in vectors]
        exact = exact + site.plan.weight(20.0, 2.0) * torch.stack(received).sum(0)
        sent = sent + site.sends(vectors, 20.0)
        site.restart()
    assert left_out(site).norm() > 0.01 * exact.norm(), "an int2 sum is not exact"
    torch.testing.assert_close(sent + left_out(site), exact, rtol=1e-4, atol=1e-2)


def test_a_relay_killed_during_a_sum_does_not_send_its_residual_again(tmp_path: Path) -> None:
    site = Site("int4", "mean", tmp_path)
    site.sends(contributions(site, 3, 1), 20.0)
    assert left_out(site).any()
    site.sends(contributions(site, 3, 2), 20.0, killed=True)
    site.restart()
    assert not left_out(site).any()


def test_a_relay_ignores_what_it_left_out_of_another_run(tmp_path: Path) -> None:
    site = Site("int4", "mean", tmp_path)
    site.sends(contributions(site, 3, 1), 20.0)
    site.restart("another")
    assert not left_out(site).any()


def test_a_sum_of_a_lost_connection_leaves_no_residual(tmp_path: Path) -> None:
    """The shard may have merged it, or not."""
    site = Site("int4", "mean", tmp_path)
    site.sends(contributions(site, 3, 1), 20.0)
    site.sends(contributions(site, 3, 2), 20.0, killed=True)
    site.relay.settle(0, site.sums, "unknown")
    assert not left_out(site).any()


def test_a_relay_with_a_damaged_or_full_disk_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site("int4", "mean", tmp_path)
    site.sends(contributions(site, 3, 1), 20.0)
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"torn")
    site.restart()
    site.sends(contributions(site, 3, 2), 20.0)
    assert "is dropped" in caplog.text
    site.relay.residuals._folder = file  # type: ignore[attr-defined]
    site.sends(contributions(site, 3, 3), 20.0)
    assert "would lose a residual" in caplog.text
    assert left_out(site).any()


@pytest.mark.parametrize("seed", range(3))
def test_after_a_power_failure_no_residual_is_sent_again(tmp_path: Path, seed: int) -> None:
    (tmp_path / "disk").mkdir()
    disk = SimulatedDisk(tmp_path / "disk")
    with within(Runtime(disk)):
        kept = KeptResiduals(tmp_path / "disk" / "site-a", "run")
        kept.keep(0, (torch.ones(N),))
        assert kept.take(0, N)[0].equal(torch.ones(N))
        taken = len(disk.log)
        kept.keep(0, (2 * torch.ones(N),))
    disk.close()
    for done in range(len(disk.log) + 1):
        loss = Loss(Choices(seed), names=0.5 * seed, writes=0.5, zeros=0.5)
        write_folder(after := tmp_path / f"{done}", remains(disk.before, disk.log[:done], loss))
        found = [each[0].item() for each in KeptResiduals(after / "site-a", "run").take(0, N)]
        assert found in ([], [1.0] if done < taken else [2.0])
    assert found == [2.0], "it was durable"


async def test_the_next_sum_is_expected_while_one_is_verified() -> None:
    shard = Shard()
    await shard.arrives(*shard.sum_of([unit(0), unit(1)], 200.0))
    for ask in ASKS:
        shard.tensors.folded_at_relay(0, ask, 2.0, 20.0, 1.0, 1.0)
        shard.tensors.reported(0, ask, 1.0)
        shard.tensors.folded_at_relay(0, ask, 2.0, 20.0, 1.0, 1.0)
    fact = await shard.arrives(*shard.sum_of([unit(0), unit(1)], 200.0), number=2)
    assert isinstance(fact, messages.SumArrived)


async def test_a_sum_that_could_not_be_sent_frees_the_next_number() -> None:
    shard = Shard()
    shard.sums.failed("c", messages.SumCorrupt("", 0, 1, ASKS, "the connection broke"))
    assert shard.facts.pop() == messages.SumCorrupt("site-a", 0, 1, ASKS, "the connection broke")
    fact = await shard.arrives(*shard.sum_of([unit(0), unit(1)], 200.0), number=2)
    assert isinstance(fact, messages.SumArrived)


async def test_a_sum_that_is_verified_after_its_connection_is_lost_is_forgotten() -> None:
    """The relay's next connection counts its sums from 1 again."""
    shard = Shard()
    verify = shard.tensors.verify_sum

    def lost_meanwhile(*arguments: Any) -> None:
        verify(*arguments)
        shard.sums.end("c")

    shard.tensors.verify_sum = lost_meanwhile  # type: ignore[method-assign]
    shard.facts.append(None)
    assert await shard.arrives(*shard.sum_of([unit(0), unit(1)], 200.0)) is None


async def test_a_new_connection_does_not_disturb_the_sums_of_the_old_one() -> None:
    """An end that has lost a connection may connect again before the other end notices."""
    shard = Shard()
    shard.sums.begin("site-a", "d", [0])
    shard.sums.begin("site-a", "c", [0])
    assert isinstance(
        await shard.arrives(*shard.sum_of([unit(0), unit(1)], 200.0)), messages.SumArrived
    )
    shard.sums.end("c")
    shard.sums.begin("site-a", "d", [0])
    shard.bodies.open("sum/0/site-a/d/1", "site-a", (0, 96), 96, take_over=False)


async def test_the_sums_of_a_lost_connection_are_refused() -> None:
    shard = Shard()
    shard.sums.end("c")
    shard.sums.announce("c", messages.Sum(0, 1, ASKS, ""))
    with pytest.raises(Exception, match="was cancelled"):
        shard.bodies.open("sum/0/site-a/c/1", "site-a", (0, 8), 8, take_over=False)
