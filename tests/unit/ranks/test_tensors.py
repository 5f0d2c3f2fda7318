"""A rank's parameters: on the host, and as if they were on a device with a stream beside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco.learner.parameter_store import ModuleStore, Rounded
from decoupled_diloco.merge import gather, layout_of, partition, tensors_of
from decoupled_diloco.ranks.rank_model import RankModel
from decoupled_diloco.ranks.rank_store import HELD, CarriedValues
from decoupled_diloco.ranks.redistribute import Box, Sharding
from decoupled_diloco.ranks.tensors import RankTensors
from decoupled_diloco.runtime import blocking
from fake_side_stream import FakeSideStream, MetaSideStream, OnOneDevice


class Mixed(nn.Module):
    """Two dtypes and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.half = nn.Linear(4, 6, bias=False, dtype=torch.bfloat16)
        self.register_buffer("running", torch.zeros(2))


class One:
    """The one rank of a learner, and what it carries."""

    def __init__(self, device: str = "cpu") -> None:
        torch.manual_seed(0)
        module = Mixed().to(device)
        layout = layout_of(module)
        self.own = tensors_of(module, layout)
        shapes = tuple(spec.shape for spec in layout.tensors)
        boxes = tuple((Box.whole(shape),) for shape in shapes)
        model = RankModel(layout, Sharding(shapes, boxes), tuple(self.own), (0,))
        self.fragments = partition(layout, 2)
        self.carried = CarriedValues()
        self.tensors = RankTensors(model, self.fragments, 0, self._exchange, self.carried)

    @staticmethod
    async def _exchange(out: Tensor, given: Tensor, outs: list[int], gives: list[int]) -> None:
        out.copy_(given)

    def order(self, what: str, fragment: int, handle: int) -> None:
        """A copy or a spread, and waits until it is done."""
        self.carry_out([what, fragment, handle])
        blocking(self.tensors.idle())

    def carry_out(self, *orders: list[object]) -> None:
        blocking(self.tensors.carry_out(orders))

    def now(self, fragment: int) -> Tensor:
        return gather(self.fragments[fragment], self.own)


CUDA = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
)


@pytest.fixture(params=["cpu", "beside", CUDA])
def one(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[One]:
    """On a device; or on the CPU, as if what comes and goes went by a stream beside."""
    if request.param != "beside":
        found = One(request.param)
        yield found
        found.tensors.close()
        return
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: True)  # without CUDA nothing can be
    found, side = One(), FakeSideStream()
    found.tensors._side = side  # type: ignore[assignment]
    yield found
    found.tensors.close()
    assert side.up
    assert side.down


def test_a_rank_of_its_own_writes_what_a_plain_store_does(one: One) -> None:
    torch.manual_seed(0)
    store = ModuleStore(Mixed())
    generator = torch.Generator().manual_seed(1)
    for number, part in enumerate(one.fragments):
        held = torch.zeros(part.numel)
        for round_, how in enumerate(("overwrite", "carry", "rebase", "blend", "again")):
            sent, copied = store.snapshot(part), 100 * number + round_
            handle = 1000 + copied
            one.order("copy", number, copied)
            assert torch.equal(one.carried.future(copied).result(0), sent.values())
            new = torch.randn(part.numel, generator=generator)
            one.carried.put(handle, new)
            one.order("spread", number, handle)
            match how:
                case "overwrite":
                    store.overwrite(part, new)
                    told: list[object] = [handle, None, 0.0]
                case "carry":
                    store.combine(part, new, sent, 1.0)
                    told = [handle, copied, 1.0]
                case "rebase":
                    store.combine(part, new, Rounded(part, store.layout, held), 1.0)
                    told = [handle, HELD, 1.0]
                case "blend":
                    store.combine(part, new, None, 0.5)
                    told = [handle, None, 0.5]
                case _:
                    new = held
                    store.overwrite(part, new)
                    told = [HELD, None, 0.0]
            one.carry_out(["write", number, *told], ["forget", copied])
            held = new
            assert torch.equal(one.now(number), store.snapshot(part).values()), how


def test_nothing_goes_to_the_device_but_by_the_stream_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: True)
    one = One("meta")  # in the place of a GPU
    one.tensors._side = MetaSideStream()  # type: ignore[assignment]
    for number, part in enumerate(one.fragments):
        one.order("copy", number, number)
        for handle, minus, keep in ((10, None, 0.0), (20, number, 1.0), (30, HELD, 1.0)):
            one.carried.put(handle + number, torch.ones(part.numel))
            one.order("spread", number, handle + number)
            with OnOneDevice():
                one.carry_out(["write", number, handle + number, minus, keep])
        with OnOneDevice():
            one.carry_out(["write", number, HELD, None, 0.5])
        assert one.carried.future(number).result(0).device.type == "cpu"
    one.tensors.close()
