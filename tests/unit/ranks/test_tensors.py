"""A rank's parameters: on the host, and with a simulated side stream of a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco.learner.parameter_store import ModuleStore, Rounded
from decoupled_diloco.merge import gather, layout_of, partition, tensors_of
from decoupled_diloco.ranks.rank_model import RankModel
from decoupled_diloco.ranks.rank_store import HELD, SyncRankValues
from decoupled_diloco.ranks.redistribute import Box, Sharding
from decoupled_diloco.ranks.tensors import RankTensors
from decoupled_diloco.runtime import blocking
from fake_side_stream import FakeSideStream, MetaSideStream, OnOneDevice


class Mixed(nn.Module):
    """A model with two dtypes and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.half = nn.Linear(4, 6, bias=False, dtype=torch.bfloat16)
        self.register_buffer("running", torch.zeros(2))


class One:
    """The only rank of a learner, which is also its sync rank."""

    def __init__(self, device: str = "cpu") -> None:
        torch.manual_seed(0)
        module = Mixed().to(device)
        layout = layout_of(module)
        self.own = tensors_of(module, layout)
        shapes = tuple(spec.shape for spec in layout.tensors)
        boxes = tuple((Box.whole(shape),) for shape in shapes)
        model = RankModel(layout, Sharding(shapes, boxes), tuple(self.own), (0,))
        self.fragments = partition(layout, 2)
        self.sync_rank_values = SyncRankValues()
        self.tensors = RankTensors(model, self.fragments, 0, self._exchange, self.sync_rank_values)

    @staticmethod
    async def _exchange(out: Tensor, given: Tensor, outs: list[int], gives: list[int]) -> None:
        out.copy_(given)

    def order(self, what: str, fragment: int, handle: int) -> None:
        """Execute a copy or a spread, and wait until it is done."""
        self.carry_out([what, fragment, handle])
        blocking(self.tensors.idle())

    def carry_out(self, *orders: list[object]) -> None:
        blocking(self.tensors.carry_out(orders))

    def now(self, fragment: int) -> Tensor:
        return gather(self.fragments[fragment], self.own)


CUDA = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
)


@pytest.fixture(params=["cpu", "side stream", CUDA])
def one(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[One]:
    """A rank on a device, or on the CPU with a fake side stream."""
    if request.param != "side stream":
        found = One(request.param)
        yield found
        found.tensors.close()
        return
    # Without CUDA, no tensor can be pinned.
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: True)
    found, side = One(), FakeSideStream()
    found.tensors._side = side  # type: ignore[assignment]
    yield found
    found.tensors.close()
    assert side.up
    assert side.down


def test_a_single_rank_writes_the_same_as_a_plain_store(one: One) -> None:
    torch.manual_seed(0)
    store = ModuleStore(Mixed())
    generator = torch.Generator().manual_seed(1)
    for number, part in enumerate(one.fragments):
        held = torch.zeros(part.numel)
        for round_, how in enumerate(("overwrite", "carry", "rebase", "blend", "again")):
            sent, copied = store.snapshot(part), 100 * number + round_
            handle = 1000 + copied
            one.order("copy", number, copied)
            assert torch.equal(one.sync_rank_values.future(copied).result(0), sent.values())
            new = torch.randn(part.numel, generator=generator)
            one.sync_rank_values.put(handle, new)
            one.order("spread", number, handle)
            match how:
                case "overwrite":
                    store.overwrite(part, new)
                    write: list[object] = [handle, None, 0.0]
                case "carry":
                    store.combine(part, new, sent, 1.0)
                    write = [handle, copied, 1.0]
                case "rebase":
                    store.combine(part, new, Rounded(part, store.layout, held), 1.0)
                    write = [handle, HELD, 1.0]
                case "blend":
                    store.combine(part, new, None, 0.5)
                    write = [handle, None, 0.5]
                case _:
                    new = held
                    store.overwrite(part, new)
                    write = [HELD, None, 0.0]
            one.carry_out(["write", number, *write], ["forget", copied])
            held = new
            assert torch.equal(one.now(number), store.snapshot(part).values()), how


def test_only_the_side_stream_copies_to_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: True)
    one = One("meta")  # replaces a GPU
    one.tensors._side = MetaSideStream()  # type: ignore[assignment]
    for number, part in enumerate(one.fragments):
        one.order("copy", number, number)
        for handle, minus, keep in ((10, None, 0.0), (20, number, 1.0), (30, HELD, 1.0)):
            one.sync_rank_values.put(handle + number, torch.ones(part.numel))
            one.order("spread", number, handle + number)
            with OnOneDevice():
                one.carry_out(["write", number, handle + number, minus, keep])
        with OnOneDevice():
            one.carry_out(["write", number, HELD, None, 0.5])
        assert one.sync_rank_values.future(number).result(0).device.type == "cpu"
    one.tensors.close()
