import base64
import json
import subprocess
import sys
import zlib

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from decoupled_diloco.errors import ConfigError, ProtocolError
from decoupled_diloco.learner.parameter_store import ModuleStore
from decoupled_diloco.merge import (
    Fragment,
    Layout,
    Piece,
    Segment,
    TensorSpec,
    cast_like,
    gather,
    layout_of,
    partition,
    scatter,
    segments,
    tensors_of,
)
from decoupled_diloco.merge.fragments import dtype_runs, mapped


class Model(nn.Module):
    """Tied embedding and head, a frozen layer, a buffer, and a bf16 layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        for name in dict(self.norm.named_buffers()):  # buffers that stay local
            self.norm._non_persistent_buffers_set.add(name)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].to(torch.bfloat16)


def matrices(*sizes: int) -> Layout:
    return Layout(
        tuple(TensorSpec(f"t{i}", (n,), "float32", "matrix") for i, n in enumerate(sizes))
    )


def sizes(fragments):
    return [fragment.numel for fragment in fragments]


def elements(fragments):
    return sorted(
        (piece.tensor, element)
        for fragment in fragments
        for piece in fragment.pieces
        for element in range(piece.start, piece.stop)
    )


def experts(count: int) -> Layout:
    """A mixture of experts with one module per expert."""
    place = "model.layers.{}.mlp.experts.{}.gate_proj.weight"
    return Layout(
        tuple(
            TensorSpec(place.format(n // 128, n % 128), (4, 4), "bfloat16", "matrix")
            for n in range(count)
        )
    )


class TestText:
    @pytest.mark.parametrize("count", [1, 30_000])
    def test_layout_text_round_trip(self, count):
        text = experts(count).to_text()
        assert Layout.from_text(text) == experts(count)
        assert len(text) < 250_000

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("zlib:####", "cannot be decompressed"),
            ("zlib:aGVsbG8=", "cannot be decompressed"),
            ("zlib:" + base64.b64encode(zlib.compress(b"[]")).decode()[:-8], "torn|decompressed"),
            ("zlib:" + base64.b64encode(zlib.compress(b"{")).decode(), "is not JSON"),
            ("zlib:" + base64.b64encode(zlib.compress(bytes(1 << 27))).decode(), "more than 6710"),
        ],
    )
    def test_hostile_text_is_rejected(self, text, problem):
        with pytest.raises(ProtocolError, match=problem):
            Layout.from_text(text)


class TestLayoutOf:
    def test_trainable_tensors_in_module_order(self):
        layout = layout_of(Model())
        assert [spec.name for spec in layout.tensors] == [
            "embed.weight",
            "blocks.0.weight",
            "blocks.0.bias",
            "blocks.1.weight",
            "blocks.1.bias",
            "blocks.2.weight",
            "blocks.2.bias",
            "norm.weight",
            "norm.bias",
        ]
        assert layout.tensors[3] == TensorSpec("blocks.1.weight", (4, 4), "bfloat16", "matrix")
        assert layout.numel == sum(spec.numel for spec in layout.tensors) == 40 + 3 * 20 + 8

    def test_tied_weights_are_one_tensor_and_the_embedding_rule_wins(self):
        assert layout_of(Model()).tensors[0] == TensorSpec(
            "embed.weight", (10, 4), "float32", "embedding", ("head.weight",)
        )

    def test_the_embedding_rule_wins_if_the_head_comes_first(self):
        model = nn.Sequential(nn.Linear(4, 10, bias=False), nn.Embedding(10, 4))
        model[1].weight = model[0].weight
        (spec,) = layout_of(model).tensors
        assert (spec.name, spec.role, spec.aliases) == ("0.weight", "embedding", ("1.weight",))

    def test_two_parameters_over_one_storage_are_tied(self):
        model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False))
        model[1].weight = nn.Parameter(model[0].weight.data)
        (spec,) = layout_of(model).tensors
        assert spec.aliases == ("1.weight",)

    def test_one_module_at_two_places_is_tied(self):
        shared = nn.Embedding(5, 2)
        (spec,) = layout_of(nn.ModuleDict({"a": shared, "b": shared})).tensors
        assert (spec.name, spec.role, spec.aliases) == ("a.weight", "embedding", ("b.weight",))

    def test_views_of_one_buffer_that_do_not_overlap_are_separate(self):
        flat = torch.zeros(12)
        model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False))
        model[0].weight = nn.Parameter(flat[:6].view(2, 3))
        model[1].weight = nn.Parameter(flat[6:].view(2, 3))
        assert len(layout_of(model).tensors) == 2

    def test_partly_shared_storage_is_rejected(self):
        model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False))
        model[1].weight = nn.Parameter(model[0].weight.data.t())
        with pytest.raises(ConfigError, match=r"'0\.weight' and '1\.weight' share a part"):
            layout_of(model)

    def test_frozen_parameters_and_buffers_are_listed_as_excluded(self):
        assert layout_of(Model()).excluded == (
            "frozen.weight",
            "frozen.bias",
            "norm.running_mean",
            "norm.running_var",
            "norm.num_batches_tracked",
        )

    def test_wrapped_modules_keep_their_names(self):
        model = Model()
        model.norm = nn.BatchNorm1d(4)
        plain = layout_of(model)
        model.embed = torch.compile(model.embed)
        model.blocks[1] = torch.compile(checkpoint_wrapper(model.blocks[1]))
        model.norm = checkpoint_wrapper(model.norm)
        assert layout_of(model) == plain
        named = dict(
            zip((spec.name for spec in plain.tensors), tensors_of(model, plain), strict=True)
        )
        assert named["blocks.1.weight"] is model.blocks[1].weight
        assert named["norm.running_mean"] is model.norm.running_mean
        assert ModuleStore(model).layout == plain

    def test_the_meta_device_gives_the_same_layout(self):
        model = Model()
        meta = Model().to("meta")
        meta.head.weight = meta.embed.weight
        assert layout_of(meta) == layout_of(model)

    def test_a_model_without_trainable_parameters_is_rejected(self):
        with pytest.raises(ConfigError, match="no trainable parameter among 2: set requires_grad"):
            layout_of(nn.Linear(2, 2).requires_grad_(False))

    def test_an_unsupported_dtype_is_rejected(self):
        with pytest.raises(
            ConfigError, match="'weight' has dtype complex64, supported dtypes are float32"
        ):
            layout_of(nn.Linear(2, 2, dtype=torch.complex64))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
    def test_supported_dtypes(self, dtype):
        model = nn.Linear(2, 2, bias=False, dtype=getattr(torch, dtype))
        assert layout_of(model).tensors[0].dtype == dtype

    def test_a_tensor_without_elements_is_excluded(self):
        model = nn.Linear(2, 2)
        model.empty = nn.Parameter(torch.zeros(0, 3))
        assert layout_of(model).excluded == ("empty",)


class TestTensorsOf:
    def test_returns_the_parameters_in_layout_order(self):
        model = Model()
        found = tensors_of(model, layout_of(model))
        assert found[0] is model.embed.weight
        assert found[-1] is model.norm.bias

    def test_another_model_is_rejected(self):
        with pytest.raises(ConfigError, match="tensor 0 differs in name"):
            tensors_of(nn.Linear(2, 2), layout_of(Model()))


class TestLayout:
    def test_json_round_trip(self):
        layout = layout_of(Model())
        assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout

    def test_fingerprint_is_the_same_in_another_process(self):
        layout = matrices(3, 4)
        program = (
            "from decoupled_diloco.merge import Layout\n"
            f"print(Layout.from_json({layout.to_json()!r}).fingerprint)"
        )
        answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert answer.stdout.strip() == layout.fingerprint

    def test_excluded_names_do_not_change_the_fingerprint(self):
        layout = matrices(3)
        assert Layout(layout.tensors, ("buffer",)).fingerprint == layout.fingerprint

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("name", "u", "tensor 1 differs in name: ours 't1', theirs 'u'"),
            ("shape", (9,), "tensor 1 't1' differs in shape: ours (4,), theirs (9,)"),
            (
                "dtype",
                "float16",
                "tensor 1 't1' differs in dtype: ours 'float32', theirs 'float16'",
            ),
            (
                "role",
                "embedding",
                "tensor 1 't1' differs in role: ours 'matrix', theirs 'embedding'",
            ),
            ("aliases", ("h",), "tensor 1 't1' differs in aliases: ours (), theirs ('h',)"),
        ],
    )
    def test_a_difference_in_any_field_is_described(self, field, value, message):
        ours = matrices(3, 4)
        changed = TensorSpec(**{**vars(ours.tensors[1]), field: value})
        theirs = Layout((ours.tensors[0], changed))
        assert ours.describe_difference(theirs) == message
        assert ours.fingerprint != theirs.fingerprint

    def test_equal_layouts_do_not_differ(self):
        assert matrices(3, 4).describe_difference(matrices(3, 4)) is None

    def test_a_missing_tensor_is_named_on_either_side(self):
        message = "tensor 1 't1' is only in {}: ours has {} tensors, theirs {}"
        short, long = matrices(3), matrices(3, 4)
        assert short.describe_difference(long) == message.format("theirs", 1, 2)
        assert long.describe_difference(short) == message.format("ours", 2, 1)


def change(path, value):
    """Return the JSON of a valid layout with one value replaced."""
    data = matrices(3, 4).to_json()
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "layout is None"),
        ([], r"layout is \[\]"),
        ({}, "layout.tensors is {}: Field required"),
        ({**matrices(3).to_json(), "more": 1}, "layout.more is 1: "),
        ({"tensors": [], "excluded": [], "constants": []}, "at least 1 item"),
        ({"tensors": {}, "excluded": [], "constants": []}, "layout.tensors is {}"),
        (change(["tensors", 0], 3), r"tensors\[0\] is 3: "),
        (change(["tensors", 0, "extra"], 3), r"tensors\[0\].extra is 3: "),
        (change(["tensors", 0, "name"], 3), "name is 3: "),
        (change(["tensors", 0, "name"], ""), "at least 1 character"),
        (change(["tensors", 0, "name"], "x" * 2000), "at most 1024 characters"),
        (change(["tensors", 0, "name"], "t1"), "names tensor 't1' twice"),
        (change(["tensors", 0, "aliases"], ["t1"]), "names tensor 't1' twice"),
        (change(["tensors", 0, "aliases"], "t9"), "aliases is 't9'"),
        (change(["tensors", 0, "shape"], [0]), r"shape\[0\] is 0: "),
        (change(["tensors", 0, "shape"], [-1]), r"shape\[0\] is -1: "),
        (change(["tensors", 0, "shape"], [True]), r"shape\[0\] is True: "),
        (change(["tensors", 0, "shape"], [1.0]), r"shape\[0\] is 1.0: "),
        (change(["tensors", 0, "shape"], [2**60]), r"shape\[0\] is 1152921504606846976: "),
        (change(["tensors", 0, "shape"], [2**40, 2**40]), "more than the limit"),
        (change(["tensors", 0, "shape"], [1] * 17), "at most 16 items"),
        (change(["tensors", 0, "dtype"], "int8"), "dtype is 'int8': "),
        (change(["tensors", 0, "dtype"], []), "dtype is"),
        (change(["tensors", 0, "role"], "head"), "role is 'head'"),
        (change(["tensors", 0, "role"], None), "role is None"),
        (change(["excluded"], [1]), r"excluded\[0\] is 1: "),
    ],
)
def test_a_layout_from_a_peer_is_validated(data, message):
    with pytest.raises(ProtocolError, match=message):
        Layout.from_json(data)


class TestBalanced:
    def test_largest_first_into_the_smallest_bin(self):
        fragments = partition(matrices(3, 4, 5, 3, 3), 3)
        assert [[piece.tensor for piece in f.pieces] for f in fragments] == [[2], [1, 4], [0, 3]]

    def test_a_tensor_larger_than_a_fair_share_is_split(self):
        fragments = partition(matrices(80, 10, 10), 4)
        assert sizes(fragments) == [25, 25, 25, 25]

    def test_splits_fall_between_leading_rows_if_rows_are_small(self):
        layout = Layout((TensorSpec("t", (1000, 3), "float32", "matrix"),))
        for fragment in partition(layout, 7):
            for piece in fragment.pieces:
                assert piece.start % 3 == piece.stop % 3 == 0

    def test_large_rows_are_split(self):
        layout = Layout((TensorSpec("t", (2, 500), "float32", "matrix"),))
        assert sizes(partition(layout, 8)) == [125] * 8

    def test_a_tensor_of_a_fair_share_stays_whole(self):
        fragments = partition(matrices(10, 10, 10), 3)
        assert all(fragment.pieces[0].numel == 10 for fragment in fragments)

    def test_the_embedding_is_spread_over_the_smallest_bins(self):
        layout = Layout((*matrices(60, 30).tensors, TensorSpec("e", (90,), "float32", "embedding")))
        fragments = partition(layout, 3)
        assert sizes(fragments) == [60, 60, 60]
        assert [piece.tensor for piece in fragments[1].pieces] == [1, 2]

    def test_splittable_true_balances_exactly(self):
        assert sizes(partition(matrices(7, 7, 7), 2, splittable=True)) == [11, 10]

    def test_splittable_false_keeps_large_tensors_whole(self):
        assert sizes(partition(matrices(80, 10, 10), 2, splittable=False)) == [80, 20]

    def test_splittable_may_choose_tensors(self):
        fragments = partition(matrices(6, 4), 2, splittable=lambda spec: spec.name == "t1")
        assert [fragment.pieces for fragment in fragments] == [
            (Piece(0, 0, 5),),
            (Piece(0, 5, 6), Piece(1, 0, 4)),
        ]

    def test_as_many_fragments_as_elements(self):
        assert sizes(partition(matrices(5, 3), 8)) == [1] * 8

    def test_more_fragments_than_elements_are_rejected(self):
        with pytest.raises(ConfigError, match=r"fragments=9 exceeds elements=8 .* at most 8"):
            partition(matrices(5, 3), 9)

    def test_more_fragments_than_whole_tensors_are_rejected(self):
        with pytest.raises(
            ConfigError, match=r"fragments=3 exceeds tensors=2 .* allow tensors to be split"
        ):
            partition(matrices(5, 3), 3, splittable=False)

    def test_a_scalar_parameter(self):
        layout = Layout((TensorSpec("s", (), "float32", "matrix"), *matrices(3).tensors))
        assert sizes(partition(layout, 4)) == [1, 1, 1, 1]

    def test_adjacent_pieces_are_joined_and_in_layout_order(self):
        for fragment in partition(matrices(100, 3, 3, 2), 3):
            spans = [(piece.tensor, piece.start) for piece in fragment.pieces]
            assert spans == sorted(spans)


class TestWholeTensors:
    def test_tensor_strategy_assigns_tensors_in_turn(self):
        fragments = partition(matrices(9, 1, 1, 1, 1), 2, "tensor")
        assert sizes(fragments) == [11, 2]

    def test_layers_strided(self):
        layout = layout_of(Model())
        fragments = partition(layout, 2, "layer-strided")
        assert names(layout, fragments) == [
            ["embed.weight", "blocks.1.weight", "blocks.1.bias", "norm.weight", "norm.bias"],
            ["blocks.0.weight", "blocks.0.bias", "blocks.2.weight", "blocks.2.bias"],
        ]

    def test_layers_sequential(self):
        layout = layout_of(Model())
        fragments = partition(layout, 2, "layer-sequential")
        assert names(layout, fragments) == [
            [
                "embed.weight",
                "blocks.0.weight",
                "blocks.0.bias",
                "blocks.1.weight",
                "blocks.1.bias",
            ],
            ["blocks.2.weight", "blocks.2.bias", "norm.weight", "norm.bias"],
        ]

    @pytest.mark.parametrize(
        ("strategy", "limit"),
        [("tensor", "tensors=9"), ("layer-strided", "layers=5"), ("layer-sequential", "layers=5")],
    )
    def test_the_error_for_too_many_fragments_has_the_limit_and_a_fix(self, strategy, limit):
        with pytest.raises(ConfigError, match=f"fragments=10 exceeds {limit} .*balanced"):
            partition(layout_of(Model()), 10, strategy)


def names(layout, fragments):
    return [[layout.tensors[piece.tensor].name for piece in f.pieces] for f in fragments]


@pytest.mark.parametrize("strategy", ["balanced", "tensor", "layer-strided", "layer-sequential"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_element_once_in_every_strategy(strategy, count):
    layout = layout_of(Model())
    fragments = partition(layout, count, strategy)
    assert [fragment.index for fragment in fragments] == list(range(count))
    assert elements(fragments) == elements(partition(layout, 1))
    assert len(elements(fragments)) == layout.numel
    assert fragments == partition(layout, count, strategy)


def test_partition_rejects_zero_fragments_and_unknown_strategies():
    with pytest.raises(ConfigError, match="fragments=0 is below 1"):
        partition(matrices(3), 0)
    with pytest.raises(ConfigError, match="strategy='random' is unknown"):
        partition(matrices(3), 1, "random")


class TestMap:
    layout = layout_of(Model())

    def names(self, modules):
        return [
            [self.layout.tensors[piece.tensor].name for piece in fragment.pieces]
            for fragment in mapped(self.layout, modules)
        ]

    def test_a_name_selects_everything_below_it_and_the_first_list_wins(self):
        assert self.names([["blocks.0", "embed.weight"], ["blocks"], ["*"]]) == [
            ["embed.weight", "blocks.0.weight", "blocks.0.bias"],
            ["blocks.1.weight", "blocks.1.bias", "blocks.2.weight", "blocks.2.bias"],
            ["norm.weight", "norm.bias"],
        ]

    def test_patterns_match_as_in_file_names(self):
        assert self.names([["blocks.[01]"], ["blocks.?", "norm"], ["embed"]])[0] == [
            "blocks.0.weight",
            "blocks.0.bias",
            "blocks.1.weight",
            "blocks.1.bias",
        ]

    def test_every_element_is_in_one_fragment(self):
        fragments = mapped(self.layout, [["blocks"], ["*"]])
        assert [fragment.index for fragment in fragments] == [0, 1]
        assert sum(fragment.numel for fragment in fragments) == self.layout.numel

    @pytest.mark.parametrize(
        ("modules", "sentence"),
        [
            ([["blocks"], ["embed"]], "does not select the tensor 'norm.weight'"),
            ([["*"], ["blocks"]], r"no tensor is left for list 1, \['blocks'\]"),
            ([["bloks"], ["*"]], r"no tensor is left for list 0, \['bloks'\]"),
            ([["blocks", "norm"], []], "does not select the tensor 'embed.weight'"),
        ],
    )
    def test_a_map_that_does_not_match_the_model_is_rejected(self, modules, sentence):
        with pytest.raises(ConfigError, match=sentence):
            mapped(self.layout, modules)


class TestSegments:
    layout = Layout(
        (
            TensorSpec("e", (4,), "float32", "embedding"),
            TensorSpec("f", (3,), "float32", "embedding"),
            TensorSpec("a", (2,), "float32", "matrix"),
            TensorSpec("b", (5,), "float32", "matrix"),
        )
    )
    fragment = Fragment(0, (Piece(0, 1, 4), Piece(1, 0, 3), Piece(2, 0, 2), Piece(3, 1, 5)))

    def test_rda_piece_by_piece_and_embeddings_by_mean(self):
        assert segments(self.fragment, self.layout, "rda") == (
            Segment(0, 6, "mean"),
            Segment(6, 8, "rda"),
            Segment(8, 12, "rda"),
        )

    def test_mean_is_one_segment(self):
        assert segments(self.fragment, self.layout, "mean") == (Segment(0, 12, "mean"),)


class TestFlat:
    def test_gather_then_scatter_is_the_identity(self):
        model, other = Model(), Model()
        layout = layout_of(model)
        source, target = tensors_of(model, layout), tensors_of(other, layout)
        for fragment in partition(layout, 3):
            scatter(fragment, gather(fragment, source), target)
        for a, b in zip(source, target, strict=True):
            assert torch.equal(a, b)

    def test_gather_into_a_given_vector_of_another_dtype(self):
        tensors = [torch.tensor([[1.0, 2.0], [3.0, 4.0]])]
        out = torch.empty(2, dtype=torch.bfloat16)
        assert gather(Fragment(0, (Piece(0, 1, 3),)), tensors, out) is out
        assert out.tolist() == [2.0, 3.0]

    def test_strides_do_not_matter(self):
        tensor = torch.zeros(3, 2).t()
        fragment = Fragment(0, (Piece(0, 1, 5),))
        scatter(fragment, torch.tensor([1.0, 2.0, 3.0, 4.0]), [tensor])
        assert tensor.tolist() == [[0, 1, 2], [3, 4, 0]]
        assert gather(fragment, [tensor]).tolist() == [1, 2, 3, 4]

    def test_scatter_changes_nothing_else_and_keeps_gradients(self):
        parameter = nn.Parameter(torch.zeros(4))
        parameter.sum().backward()
        scatter(Fragment(0, (Piece(0, 1, 3),)), torch.tensor([5.0, 6.0]), [parameter])
        assert parameter.tolist() == [0, 5, 6, 0]
        assert parameter.requires_grad
        assert parameter.grad.tolist() == [1, 1, 1, 1]

    def test_wrong_sizes_are_a_programmer_error(self):
        fragment = Fragment(0, (Piece(0, 0, 2),))
        with pytest.raises(AssertionError, match="shape"):
            scatter(fragment, torch.zeros(3), [torch.zeros(2)])
        with pytest.raises(AssertionError, match="shape"):
            gather(fragment, [torch.zeros(2)], torch.zeros(3))

    def test_cast_like_is_what_a_model_would_hold(self):
        layout = Layout(
            tuple(
                TensorSpec(dtype, (5,), dtype, "matrix")
                for dtype in ("float32", "bfloat16", "float16", "float64")
            )
        )
        tensors = [torch.zeros(5, dtype=getattr(torch, spec.dtype)) for spec in layout.tensors]
        (fragment,) = partition(layout, 1)
        flat = torch.randn(20, generator=torch.Generator().manual_seed(0))
        scatter(fragment, flat, tensors)
        rounded = cast_like(fragment, layout, flat)
        assert torch.equal(rounded, gather(fragment, tensors))
        assert not torch.equal(rounded, flat)
        assert cast_like(fragment, layout, flat, out=flat) is flat
        assert torch.equal(flat, rounded)

    def test_runs_of_one_dtype_are_joined(self):
        layout = layout_of(Model())
        (fragment,) = partition(layout, 1)
        assert dtype_runs(fragment, layout) == [
            (0, 60, torch.float32),
            (60, 80, torch.bfloat16),
            (80, 108, torch.float32),
        ]
