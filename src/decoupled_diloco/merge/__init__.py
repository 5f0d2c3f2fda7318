"""Merge math: pure functions on tensors, without I/O, clock or threads.

Learners and syncers share this package. A model's trainable tensors and its buffers form a
`Layout`, which `partition` splits into fragments. `contribution` computes the change that a
learner's training made, and a `Codec` encodes it. An `Accumulator` merges contributions weighted by
`token_weight`. An `OuterOptimizer` applies the merged outer gradient to the master copy. `publish`
and `receive` keep all published copies bit-identical.

Shapes:
    M  learners
    P  fragments
    N  elements of one fragment, flat
    S  segments of one fragment: ranges that are merged as one vector
    B  bytes of one payload
"""

from decoupled_diloco.merge.accumulate import EPSILON, Accumulator, Contribution, merge
from decoupled_diloco.merge.blocks import is_finite
from decoupled_diloco.merge.codec import (
    Body,
    Codec,
    RawCodec,
    SimpleCodec,
    as_bytes,
    block_digests,
    block_ranges,
    body_digest,
    codec,
    codec_names,
    digest,
    digested_by,
    is_cuttable,
    joined_digest,
    register_codec,
    register_family,
    values_digest,
)
from decoupled_diloco.merge.fragments import (
    Fragment,
    Piece,
    Segment,
    cast_like,
    clipped,
    gather,
    parameters_numel,
    partition,
    scatter,
    segments,
)
from decoupled_diloco.merge.layout import (
    DTYPES,
    Constant,
    Layout,
    TensorSpec,
    layout_of,
    tensors_of,
)
from decoupled_diloco.merge.memory import (
    inside_of,
    is_wrapper,
    keeps_values,
    local_of,
    overlaps_itself,
    place_of,
)
from decoupled_diloco.merge.outer import (
    DelayedNesterov,
    NesterovSGD,
    OuterOptimizer,
    TorchOuter,
    make_outer,
)
from decoupled_diloco.merge.plan import token_weight
from decoupled_diloco.merge.published import contribution, encode_with_feedback, publish, receive
from decoupled_diloco.merge.quantize import QuantizedCodec
from decoupled_diloco.merge.rules import OwnAccumulator, Rule
from decoupled_diloco.merge.sparse import TopKCodec

__all__ = [
    "DTYPES",
    "EPSILON",
    "Accumulator",
    "Body",
    "Codec",
    "Constant",
    "Contribution",
    "DelayedNesterov",
    "Fragment",
    "Layout",
    "NesterovSGD",
    "OuterOptimizer",
    "OwnAccumulator",
    "Piece",
    "QuantizedCodec",
    "RawCodec",
    "Rule",
    "Segment",
    "SimpleCodec",
    "TensorSpec",
    "TopKCodec",
    "TorchOuter",
    "as_bytes",
    "block_digests",
    "block_ranges",
    "body_digest",
    "cast_like",
    "clipped",
    "codec",
    "codec_names",
    "contribution",
    "digest",
    "digested_by",
    "encode_with_feedback",
    "gather",
    "inside_of",
    "is_cuttable",
    "is_finite",
    "is_wrapper",
    "joined_digest",
    "keeps_values",
    "layout_of",
    "local_of",
    "make_outer",
    "merge",
    "overlaps_itself",
    "parameters_numel",
    "partition",
    "place_of",
    "publish",
    "receive",
    "register_codec",
    "register_family",
    "scatter",
    "segments",
    "tensors_of",
    "token_weight",
    "values_digest",
]
