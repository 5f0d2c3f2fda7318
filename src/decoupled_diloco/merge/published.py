"""The published copy of a fragment, bit-identical on the syncer and all learners.

The syncer keeps a master copy Θ and a published copy Θ̂, and sends the encoded difference. Sender
and receivers add the *decoded* difference to their Θ̂, so all copies have the same bits. The
rounding error remains in Θ - Θ̂ and is sent with the next difference, so it is never lost. A
learner's contribution is its change relative to the published copy.

Shapes:
    N  elements of one fragment
    B  bytes of its payload
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from decoupled_diloco.errors import MergeError
from decoupled_diloco.merge.blocks import BLOCK, is_finite, replace_known
from decoupled_diloco.merge.codec import Body, BuffersExact, Codec, as_bytes, check_size, room_for
from decoupled_diloco.merge.fragments import Fragment, dtype_runs, parameters_numel
from decoupled_diloco.merge.layout import Layout


def contribution(
    fragment: Fragment, layout: Layout, theta: Tensor, published: Tensor, out: Tensor | None = None
) -> Tensor:
    """Return a learner's contribution: `d = θ - cast(Θ̂, dtype of θ)`, in fp32.

    The published copy is first rounded to each tensor's dtype, as it was when the learner loaded
    it, so a learner that did not train contributes exactly 0. The outer gradient is `Δ = -d`. For
    buffers and moments the contribution is the values themselves, because changes relative to
    different versions do not average to a mean.

    Args:
        theta: θ [N], fp32, as `gather` returns it.
        published: Θ̂ [N], fp32: the version that the learner started from.
        out: [N], fp32, to fill; may be `theta` itself; a new tensor if None.

    Source:
        Decoupled DiLoCo, Appendix D.2, computes the difference on the syncer from the parameters
        sent. In bf16 their rounding error exceeds the change, so here the learner computes it.
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
    """Encode `u = d + β·e`, and return the new residual `u - dec(enc(u))`.

    Args:
        d: A contribution [N], fp32; changed in place into the residual.
        residuals: Residuals of earlier contributions, fp32 [N] each; e is their sum.
        decay: β, 0 to 1.
        codec: The uplink codec of the fragment.

    Returns:
        The payload, uint8 [B], and the residual, fp32 [N]; not finite if `u` is not finite.

    Source:
        Error feedback (Seide et al. 2014; Karimireddy et al. 2019). MuLoCo (arXiv 2505.23725) and
        SparseLoCo use it with two bits and with sparse codecs.
    """
    body = room_for(codec.nbytes(d.numel()), None, d.device)
    for elements, octets, scratch in _cuts(codec, d.numel(), d.device):
        u = d[elements]
        for residual in residuals:
            u.add_(residual[elements], alpha=decay)  # break: residual-without-decay
        codec.encode(u, body[octets])
        u.sub_(codec.decode(body[octets], u.numel(), scratch))  # break: residual-is-everything
        # Buffers are sent exactly, and the rounding error of a moment is not a change: neither has
        # a residual. NaN - NaN would leave one.
        u[_changes(codec, u.numel()) :] = 0
    return body, d


def publish(
    master: Tensor, published: Tensor, codec: Codec, out: Tensor | memoryview | None = None
) -> Tensor:
    """Encode `Θ - Θ̂` (for buffers, Θ itself) and add the decoded result to the published copy.

    Moments are sent as buffers are, and only if they change the published copy.

    Afterwards `published` has exactly the bits that `receive` produces on every receiver. The
    rounding error remains in `master - published` and is sent with the next difference.

    Args:
        master: Θ [N], fp32; not changed.
        published: Θ̂ [N], fp32; changed in place.
        codec: The downlink codec of the fragment.
        out: [B], uint8, for the payload; a new tensor if None.

    Raises:
        MergeError: The difference is not finite, or exceeds the codec's range; the published copy
            is unchanged.
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
        if isinstance(codec, BuffersExact):
            codec.omit_unchanged(body[octets], scratch, published[elements])
    # A second pass on purpose: the copy must not change before the whole payload is verified.
    receive(published, body, codec)
    return body


def receive(published: Tensor, body: Body, codec: Codec) -> None:
    """Add a published difference to a copy of the previous version, in place.

    Args:
        published: Θ̂ [N], fp32: the version that the payload was encoded against.
        body: The payload, B bytes.
        codec: The downlink codec of the fragment.

    Raises:
        ProtocolError: The payload has the wrong size, and `published` is unchanged. Or the codec
            rejects a part of the payload, and the parts before it have been added.
    """
    source, numel = as_bytes(body), published.numel()
    check_size(source, codec, numel)
    for elements, octets, scratch in _cuts(codec, numel, published.device):
        values = codec.decode(source[octets], scratch.numel(), scratch)
        trained = _changes(codec, values.numel())
        published[elements][:trained].add_(values[:trained])
        if trained == values.numel():
            continue
        assert isinstance(codec, BuffersExact)
        moments = codec.values_numel
        published[elements][trained:moments] = values[trained:moments]
        replace_known(published[elements][moments:], values[moments:])


def _changes(codec: Codec, numel: int) -> int:
    """Return the number of elements sent as changes; the buffers after them are sent as values."""
    return codec.parameters_numel if isinstance(codec, BuffersExact) else numel


def _cuts(codec: Codec, numel: int, device: torch.device) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the element slice, byte slice and fp32 scratch of each cache-sized part of a fragment.

    All parts share one scratch tensor: a caller must be done with it before it continues.
    """
    step = numel if codec.group is None else codec.group * max(1, BLOCK // codec.group)
    scratch = torch.empty(min(step, numel), dtype=torch.float32, device=device)
    position = 0
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        octets = slice(position, position + codec.nbytes(stop - start))
        yield slice(start, stop), octets, scratch[: stop - start]
        position = octets.stop
