"""Each path of the tensors on the device is as on the host; `make gpu` runs this on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco.config.sync import EXACT_CODECS
from decoupled_diloco.learner.parameter_store import ModuleStore, Rounded
from decoupled_diloco.merge import (
    Codec,
    Fragment,
    codec,
    codec_names,
    contribution,
    parameters_numel,
    partition,
    receive,
)
from decoupled_diloco.merge.codec import BuffersExact
from decoupled_diloco.storage.states import on_host
from on_gpu.waits import DEVICE, Sleeper, finish, no_waits

ASLEEP_SECONDS = 0.1


@pytest.mark.parametrize("exact", [False, True], ids=["", "buffers exact"])
@pytest.mark.parametrize("name", codec_names())
def test_a_codec_gives_the_same_bits(name: str, exact: bool) -> None:
    """Compares decoding and adding; encoding too, where a scale is no sum or tie."""
    each: Codec = BuffersExact(codec(name), 70_000) if exact else codec(name)
    numel = 300_001
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=generator).to(torch.int32)
    bits[: numel // 4] &= -65536  # bf16's own values, and ties between two of them
    bits[: numel // 8] |= 1 << 15
    values = bits.view(torch.float32)
    values = torch.where(values.isfinite(), values, torch.zeros(()))
    body, there = each.encode(values), each.encode(values.to(DEVICE))
    assert (there.device.type, there.numel()) == (DEVICE.type, body.numel())
    if each.name in EXACT_CODECS:
        assert torch.equal(there.cpu(), body), "encoded otherwise"
    decoded = each.decode(body.to(DEVICE), numel).cpu()
    assert torch.equal(decoded.nan_to_num(), each.decode(body, numel).nan_to_num())
    body = each.encode(values.clamp(-1e30, 1e30))
    base = torch.randn(numel, generator=generator)
    added = base.to(DEVICE)
    receive(base, body, each)
    receive(added, body.to(DEVICE), each)
    assert torch.equal(added.cpu(), base), "added otherwise"


class Cut(nn.Module):
    """Matrices of one dtype, and buffers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(300, 200, dtype=dtype) for _ in range(4))
        self.register_buffer("mean", torch.randn(64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("mode", ["overwrite", "carry", "rebase", "blend"])
def test_parameters_are_written_as_on_the_host_and_without_a_wait(
    mode: str, dtype: torch.dtype
) -> None:
    """Snapshots, writes and contributions of a fragment."""
    here, there = ModuleStore(Cut(dtype)), ModuleStore(Cut(dtype).to(DEVICE))
    fragment = partition(here.layout, 1)[0]
    generator = torch.Generator().manual_seed(1)
    old, new = (torch.randn(fragment.numel, generator=generator) for _ in range(2))
    prepared = [there.prepare(each.clone()) for each in (old, new)]
    for _ in range(2):  # afterwards all memory is there
        ordered(mode, here, fragment, old, new)
        ordered(mode, there, fragment, *prepared)
        there.snapshot(fragment)
        finish(DEVICE)
    ordered(mode, here, fragment, old, new)
    is_busy = Sleeper(DEVICE).begin(ASLEEP_SECONDS)
    with no_waits(DEVICE):
        ordered(mode, there, fragment, *prepared)
        copy = there.snapshot(fragment)
    assert is_busy(), "the host waited for the device"
    finish(DEVICE)
    theta, layout = here.snapshot(fragment).values(), here.layout
    assert torch.equal(copy.values(), theta)
    d = contribution(fragment, layout, theta, new)
    assert torch.equal(contribution(fragment, layout, theta.to(DEVICE), new.to(DEVICE)).cpu(), d)
    assert parameters_numel(fragment, layout) < fragment.numel, "it has no buffers"


def ordered(mode: str, store: ModuleStore, fragment: Fragment, old: Tensor, new: Tensor) -> None:
    """What a boundary orders."""
    match mode:
        case "overwrite":
            store.overwrite(fragment, new)
        case "carry":
            store.combine(fragment, new, store.snapshot(fragment), 1.0)
        case "rebase":
            store.combine(fragment, new, Rounded(fragment, store.layout, old), 1.0)
        case _:
            store.combine(fragment, new, None, 0.5)


def test_a_state_comes_to_the_host() -> None:
    state = {"step": 3, "moments": [torch.randn(5, device=DEVICE), torch.ones(2, device=DEVICE)]}
    moments = on_host(state)["moments"]
    assert all(torch.equal(a.cpu(), b) for a, b in zip(state["moments"], moments, strict=True))
