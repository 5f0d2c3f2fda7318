"""The user's own methods by name, and the calls that import modules."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import reduce
from operator import attrgetter, getitem
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import decoupled_diloco as dd
from decoupled_diloco.config import RunConfig, dump_config, load_config
from decoupled_diloco.config.method import options_of, public_text, read_public, read_settings
from decoupled_diloco.config.plugins import MissingCodecError, plugin_versions
from decoupled_diloco.errors import ConfigError, ProtocolError
from decoupled_diloco.merge import codec, make_outer
from decoupled_diloco.merge.codec import _codecs
from decoupled_diloco.merge.rules import rule_named

IN_BF16: dict[str, Any] = {"run": {"max_steps": 9}, "sync": {"codec": {"uplink": "bf16"}}}

METHODS = """
import torch
from decoupled_diloco import register_codec
__version__ = "1.5"

class Half:
    def nbytes(self, numel):
        return 2 * numel
    def encode(self, vector):
        return vector.half().view(torch.uint8)
    def decode(self, body, numel):
        return body.view(torch.float16).float()

class Named(Half):
    name = "NAME"

register_codec(Named())

def half():
    return Half()

def first(contributions, weights):
    return contributions[0]

def plain(params, lr):
    return torch.optim.SGD(params, lr)
"""

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Yield a function that writes a new module to the file's folder, and returns its name."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = dict(_codecs)

    def write_one(text: str = METHODS, folder: Path = tmp_path) -> str:
        name = f"own_{uuid4().hex}"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(text.replace("NAME", f"codec-of-{name}"))
        return name

    yield write_one
    _codecs.clear()
    _codecs.update(before)


def run_file(folder: Path, *lines: str, imports: str = "") -> Path:
    path = folder / "run.toml"
    line = f'imports = ["{imports}"]\n' if imports else ""
    path.write_text(f"[run]\nmax_steps = 9\n{line}[sync]\nfragments = 1\n" + "\n".join(lines))
    return path


def test_a_module_in_the_folder_of_the_file_registers_a_codec_before_validation(
    tmp_path: Path, write: Write
) -> None:
    name = write()
    path = run_file(tmp_path, f'codec.uplink = "codec-of-{name}"', imports=name)
    config = load_config(path)
    assert config.run.imports == (name,)
    assert codec(config.sync.codec.uplink).nbytes(3) == 6
    assert options_of(config).uplink_codec == f"codec-of-{name}"


def test_methods_are_found_by_module_and_function(tmp_path: Path, write: Write) -> None:
    name = write()
    path = run_file(
        tmp_path,
        f'codec.uplink = ["bf16", "int4"]\ncodec.downlink = "{name}:half"',
        f'merge.rule = "{name}:first"\n[outer]\noptimizer = "{name}:plain"',
    )
    config = load_config(path)
    assert codec(f"{name}:half").name == f"{name}:half"
    assert config.sync.codec.chain == 1
    rule_named(config.sync.merge.rule)
    make_outer(config.outer.optimizer, 0.5)(3)


def test_modules_of_a_resolved_file_are_found_from_another_folder(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's run.toml is in another folder, and names the folder of the modules."""
    name = write(folder=tmp_path / "code")
    path = run_file(tmp_path / "code", f'merge.rule = "{name}:first"')
    text = dump_config(load_config(path))
    (tmp_path / "run").mkdir()
    copy = tmp_path / "run" / "run.toml"
    copy.write_text(text)
    monkeypatch.chdir(tmp_path / "run")
    again = load_config(copy)
    assert again.run.imports_from == tmp_path / "code"
    assert again.public() == load_config(path).public()


def test_a_run_starts_with_the_first_period_of_its_schedule(tmp_path: Path, write: Write) -> None:
    name = write("def f(step, steps): return 30 if step < steps - 2 else 6")
    line = f'schedule = "{name}:f"'
    config = load_config(run_file(tmp_path, line))
    assert config.sync.sync_every == 30
    assert options_of(config).schedule is not None
    assert load_config(run_file(tmp_path, line, "sync_every = 8")).sync.sync_every == 8
    again = read_public(public_text(config))
    assert (again.sync.sync_every, options_of(again)) == (30, options_of(config))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("adapt.sync_every = [4, 24]", "[sync.adapt], which determines H, too"),
        ('wait = "at_overlap"', "wait='at_overlap', which keeps H and τ fixed"),
        ("partition.phases = [3]", "phases in [sync.partition], because"),
        (
            'participation = "async"\ngrace_margin = 0.0\napply.missed = "rebase"',
            "participation='async', where each learner counts its own steps",
        ),
    ],
)
def test_what_a_schedule_cannot_be_combined_with(
    tmp_path: Path, write: Write, line: str, message: str
) -> None:
    name = write("def f(step, steps): return 24")
    with pytest.raises(ConfigError) as error:
        load_config(run_file(tmp_path, f'schedule = "{name}:f"', line))
    assert f"cannot be combined with {message}" in str(error.value)
    assert str(error.value).endswith(": take one of them out")


def test_public_settings_contain_no_modules(tmp_path: Path, write: Write) -> None:
    name = write()
    public = load_config(run_file(tmp_path, imports=name)).public()
    assert not {"imports", "imports_from"} & public["run"].keys()


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (
            "",
            'merge.rule = "no_such_module:f"',
            "merge rule 'no_such_module:f': module",
        ),
        ("", 'merge.rule = "{}:f"', "has no function 'f'"),
        (
            "raise RuntimeError('broken here')",
            'merge.rule = "{}:f"',
            "it raises RuntimeError: broken",
        ),
        (
            "import no_such_dependency",
            'merge.rule = "{}:f"',
            "No module named 'no_such_dependency'",
        ),
        ("import sys; sys.exit(3)", 'merge.rule = "{}:f"', "it raises SystemExit: 3"),
        ("def f(", 'merge.rule = "{}:f"', "it raises SyntaxError"),
        ("f = 7", 'merge.rule = "{}:f"', "has no function 'f'"),
        ("def f(): ...", 'codec.uplink = "{}:f"', "is a NoneType without nbytes, encode, decode"),
        (
            "def f(): 1 / 0",
            'codec.uplink = "{}:f"',
            "cannot be created: its function raises ZeroDivisionError",
        ),
        ("def f(): ...", 'merge.rule = "{}:f"', "requires 0 arguments"),
        ("def f(c, w): 1 / 0", 'merge.rule = "{}:f"', "it raises ZeroDivisionError"),
        (
            "def f(c, w): return c",
            'merge.rule = "{}:f"',
            "returned shape [1, 1], not a tensor of shape [1]",
        ),
        (
            "def f(p, lr): return 1",
            '[outer]\noptimizer = "{}:f"',
            "returned an int without step, state_dict",
        ),
        ("def f(step): return 24", 'schedule = "{}:f"', "schedule raises TypeError"),
        (
            "def f(step, steps): return 2",
            'schedule = "{}:f"',
            "is not below sync_every=2",
        ),
        (
            "def f(step, steps): return 8 if step < 9 else 1",
            'schedule = "{}:f"',
            "schedule returned 1 for step=9, steps=9: return an integer from 3",
        ),
        ("def f(learner): ...", 'participation = "{}:f"', "participation rule raises TypeError"),
        (
            "def f(learner, round): return 1 / len(round.learners[1:])",
            'participation = "{}:f"',
            "participation rule raises ZeroDivisionError",
        ),
        (
            "def f(learner, round): ...",
            'participation = "{}:f"',
            "returned a NoneType for learner-0: return True or False, or the reason as a text",
        ),
        ("def f(p): ...", '[outer]\noptimizer = "{}:f"', "does not take lr"),
    ],
)
def test_a_wrong_method_is_reported_in_one_sentence(
    tmp_path: Path, write: Write, text: str, line: str, message: str
) -> None:
    name = write(text)
    with pytest.raises(ConfigError) as error:
        load_config(run_file(tmp_path, line.format(name)))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_import_is_named_with_the_places_that_were_searched(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"imports='no_such_module' in \[run\]: module 'no_"):
        load_config(run_file(tmp_path, imports="no_such_module"))


def test_an_error_names_the_line_of_the_module(tmp_path: Path, write: Write) -> None:
    name = write("x = 1\ny = x.z\n")
    with pytest.raises(ConfigError, match=rf"AttributeError: .*{name}\.py, line 2\)"):
        load_config(run_file(tmp_path, imports=name))


def test_readers_of_other_settings_import_nothing(tmp_path: Path, write: Write) -> None:
    """`ddiloco status` reads a secret's path from a run's file, and needs no codec."""
    name = write("raise RuntimeError")
    path = run_file(tmp_path, f'codec.uplink = ["{name}:half", "other"]', imports=name)
    config = load_config(path, plugins=False)
    assert config.sync.codec.uplink == (f"{name}:half", "other")
    assert name not in sys.modules


@pytest.mark.parametrize("key", ["uplink", "downlink"])
def test_settings_of_a_peer_never_import(tmp_path: Path, write: Write, key: str) -> None:
    name = write("raise SystemError('imported')")
    text = public_text(RunConfig(**IN_BF16)).replace(f'"{key}": "bf16"', f'"{key}": "{name}:half"')
    with pytest.raises(MissingCodecError) as error:
        read_public(text)
    assert str(error.value) == (
        f"codec '{name}:half', which the run uses, is not registered in this program: call "
        f"decoupled_diloco.allow_codec('{name}:half') if you trust that module, before you create "
        "the Learner or Observer"
    )
    assert name not in sys.modules


@pytest.mark.parametrize(
    "key", ["sync.merge.rule", "outer.optimizer", "sync.schedule", "sync.participation"]
)
def test_a_learner_imports_no_methods_of_the_syncer(write: Write, key: str) -> None:
    name = write("raise SystemError('imported')")
    public = RunConfig(run={"max_steps": 9}).public()
    *tables, last = key.split(".")
    reduce(getitem, tables, public)[last] = f"{name}:f"
    if key == "outer.optimizer":
        del public["outer"]["momentum"]
    settings = read_public(json.dumps(public))
    assert attrgetter(key)(settings) == f"{name}:f"
    options_of(settings)
    assert name not in sys.modules


@pytest.mark.parametrize(
    "word", ["os:system", "os.path:join", "subprocess:run", "builtins:exec", "a b:c", ":", "x:"]
)
def test_no_function_of_an_installed_module_is_called(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_module(name: str) -> None:
        raise SystemError(f"{name} was imported")

    monkeypatch.setattr("importlib.import_module", import_module)
    text = public_text(RunConfig(**IN_BF16))
    text = text.replace('"uplink": "bf16"', f'"uplink": "{word}"')
    with pytest.raises((MissingCodecError, ProtocolError), match="is not registered"):
        read_public(text)


def test_a_codec_is_allowed_by_name(write: Write, tmp_path: Path, monkeypatch: Any) -> None:
    name = write()
    monkeypatch.chdir(tmp_path)
    dd.allow_codec(f"{name}:half")
    text = public_text(RunConfig(**IN_BF16))
    text = text.replace('"uplink": "bf16"', f'"uplink": "{name}:half"')
    assert read_public(text).sync.codec.uplink == f"{name}:half"
    with pytest.raises(ConfigError, match="is not of the form 'module:function'"):
        dd.allow_codec("half")


@pytest.mark.parametrize("by", ["name", "value"])
def test_an_installed_package_provides_a_codec_by_an_entry_point(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    name = write()
    short = f"short-{name}"
    info = tmp_path / f"{name}-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text(f"[decoupled_diloco]\n{short} = {name}:half\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    word = short if by == "name" else f"{name}:half"
    text = public_text(RunConfig(**IN_BF16))
    text = text.replace('"uplink": "bf16"', f'"uplink": "{word}"')
    assert read_public(text).sync.codec.uplink == word
    assert codec(word).nbytes(2) == 4
    plain = RunConfig(run={"max_steps": 9}, sync={"codec": {"downlink": word}}).public()
    assert read_settings(plain).sync.codec.downlink == word


@pytest.mark.parametrize(
    ("key", "function"),
    [
        ("sync.merge.rule", "first"),
        ("outer.optimizer", "plain"),
        ("sync.schedule", "steady"),
        ("sync.participation", "anyone"),
    ],
)
def test_an_installed_package_provides_other_methods_by_an_entry_point(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, function: str
) -> None:
    name = write(f"{METHODS}\ndef steady(step, steps): return 24\ndef anyone(l, r): return True\n")
    info = tmp_path / f"{name}-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text(f"[decoupled_diloco]\nmine = {name}:{function}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "run.toml"
    path.write_text("[run]\nmax_steps = 9\n")
    config = load_config(path, [f"{key}=mine"])
    assert attrgetter(key)(config) == f"{name}:{function}"
    assert name in plugin_versions()


def test_a_tape_names_modules_with_version_and_source(tmp_path: Path, write: Write) -> None:
    name = write()
    load_config(run_file(tmp_path, imports=name))
    version, _, digest = plugin_versions()[name].partition(" ")
    assert version == "1.5"
    assert digest.startswith("sha256:")
    assert not any(each.startswith("decoupled_diloco") for each in plugin_versions())


def test_invalid_tables_are_reported_by_the_settings() -> None:
    for text in ("[]", "3", '{"sync": 3}', '{"sync": {"codec": {"uplink": 3}}}', '{"outer": []}'):
        with pytest.raises(ProtocolError):
            read_public(text)
