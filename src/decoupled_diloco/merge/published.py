"""The published copy, which the syncer and all learners hold bit by bit alike.

The syncer keeps a master copy Θ and a published copy Θ̂. What it sends is the encoded difference;
sender and receivers add the *decoded* difference to their Θ̂, so all hold the same bits. What
rounding took is still in Θ - Θ̂ and goes out with the next difference: nothing is lost for good.
A learner's contribution is what its training changed, counted from the published copy.

Shapes:
    N  elements of one fragment
    B  bytes of its body
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from decoupled_diloco.errors import MergeError
from decoupled_diloco.merge.blocks import BLOCK, is_finite
from decoupled_diloco.merge.codec import Body, BuffersExact, Codec, as_bytes, check_size, room_for
from decoupled_diloco.merge.fragments import Fragment, dtype_runs, parameters_numel
from decoupled_diloco.merge.layout import Layout


def contribution(
    fragment: Fragment, layout: Layout, theta: Tensor, published: Tensor, out: Tensor | None = None
) -> Tensor:
    """Give what a learner's training changed: `d = θ - cast(Θ̂, dtype of θ)`, in fp32.

    The published copy is rounded through each tensor's own dtype first, as it was when the learner
    took it over: no training gives exactly 0. The outer gradient is `Δ = -d`. Of buffers it is the
    values themselves: changes that are counted from different versions do not add up to a mean.

    Args:
        theta: θ [N], fp32, as `gather` gives it.
        published: Θ̂ [N], fp32: the version that the learner started from.
        out: [N], fp32, to fill; may be `theta` itself; a new one if None.

    Source:
        Decoupled DiLoCo, Appendix D.2, takes the difference on the syncer from parameters that were
        sent; in bf16 their rounding is larger than the change, so here the learner takes it.
    """
    assert theta.shape == published.shape == (fragment.numel,), (
        f"theta {tuple(theta.shape)}, published {tuple(published.shape)}, N={fragment.numel}"
    )
    if out is None:
        out = torch.empty_like(theta)
    trained = parameters_numel(fragment, layout)
    out[trained:].copy_(theta[trained:])
    for start, end, dtype in dtype_runs(fragment, layout):
        stop = min(end, trained)
        for low in range(start, stop, BLOCK):
            block = slice(low, min(low + BLOCK, stop))
            base = published[block]
            torch.sub(theta[block], base if dtype.itemsize >= 4 else base.to(dtype), out=out[block])
    return out


def encode_with_feedback(
    d: Tensor, residuals: Sequence[Tensor], decay: float, codec: Codec
) -> tuple[Tensor, Tensor]:
    """Encode `u = d + β·e`, and give what the body lacks of it: `u - dec(enc(u))`.

    Args:
        d: A contribution [N], fp32; changed in place, it becomes what the body lacks.
        residuals: What was left of earlier ones, fp32 [N] each; e is their sum.
        decay: β, 0 to 1.

    Returns:
        The body, uint8 [B], and the residual, fp32 [N]: not finite if `u` was not.

    Source:
        Error feedback (Seide et al. 2014; Karimireddy et al. 2019), for two bits and sparse codecs
        MuLoCo (arXiv 2505.23725) and SparseLoCo.
    """
    body = room_for(codec.nbytes(d.numel()), None, d.device)
    for elements, octets, scratch in _cuts(codec, d.numel(), d.device):
        u = d[elements]
        for residual in residuals:
            u.add_(residual[elements], alpha=decay)  # break: residual-without-decay
        codec.encode(u, body[octets])
        u.sub_(codec.decode(body[octets], u.numel(), scratch))  # break: residual-is-everything
        u[_changes(codec, u.numel()) :] = 0  # what is sent as it is leaves nothing, NaN neither
    return body, d


def publish(
    master: Tensor, published: Tensor, codec: Codec, out: Tensor | memoryview | None = None
) -> Tensor:
    """Encode `Θ - Θ̂`, of buffers Θ itself, and add what all will decode to the published copy.

    Afterwards `published` has exactly the bits that `receive` gives every receiver; what rounding
    took stays in `master - published` and goes out next time.

    Args:
        master: Θ [N], fp32; not changed.
        published: Θ̂ [N], fp32; changed in place.
        out: [B], uint8, for the body; a new one if None.

    Raises:
        MergeError: The difference is not finite, or leaves the codec's range; the published copy
            has not changed.
    """
    assert master.shape == published.shape, f"{tuple(master.shape)}, {tuple(published.shape)}"
    numel = published.numel()
    body = room_for(codec.nbytes(numel), out, master.device)
    for elements, octets, scratch in _cuts(codec, numel, master.device):
        torch.sub(master[elements], published[elements], out=scratch)
        trained = _changes(codec, scratch.numel())
        scratch[trained:] = master[elements][trained:]
        codec.encode(scratch, body[octets])
        if not is_finite(codec.decode(body[octets], scratch.numel(), scratch)[:trained]):
            raise MergeError(
                f"the master differs from its published copy by NaN, or by more than codec "
                f"'{codec.name}' can hold: the outer step diverged, lower the outer lr"
            )
    receive(published, body, codec)
    return body


def receive(published: Tensor, body: Body, codec: Codec) -> None:
    """Add a published difference to a copy of the version before it, in place.

    Args:
        published: Θ̂ [N], fp32, of the version that the body was encoded against.

    Raises:
        ProtocolError: The body's size does not fit, and nothing has changed; or the codec refuses a
            part of it, and the parts before have been added.
    """
    source, numel = as_bytes(body), published.numel()
    check_size(source, codec, numel)
    for elements, octets, scratch in _cuts(codec, numel, published.device):
        values = codec.decode(source[octets], scratch.numel(), scratch)
        trained = _changes(codec, values.numel())
        published[elements][:trained].add_(values[:trained])
        published[elements][trained:] = values[trained:]


def _changes(codec: Codec, numel: int) -> int:
    """How many elements are sent as changes; the buffers behind them are sent as values."""
    return codec.parameters_numel if isinstance(codec, BuffersExact) else numel


def _cuts(codec: Codec, numel: int, device: torch.device) -> Iterator[tuple[slice, slice, Tensor]]:
    """Cut a fragment into cache-sized parts: their elements, their bytes, and an fp32 scratch."""
    step = numel if codec.group is None else codec.group * max(1, BLOCK // codec.group)
    scratch = torch.empty(min(step, numel), dtype=torch.float32, device=device)
    position = 0
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        octets = slice(position, position + codec.nbytes(stop - start))
        yield slice(start, stop), octets, scratch[: stop - start]
        position = octets.stop
