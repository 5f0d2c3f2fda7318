"""The wheel alone is the product: command, recipes, completion, types; the sdist can build it.

Further wheels add commands and engines. A wheel is installed where nothing else of this project is
visible. That environment uses this environment's other packages (torch above all) by links, which
needs no network and no time.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Collection
from pathlib import Path

import pytest

import decoupled_diloco_lab
from decoupled_diloco.__main__ import NEEDED
from decoupled_diloco.storage.weight_files import load_weights
from decoupled_diloco.tape.segments import lines_of

ROOT = Path(__file__).parents[2]

SMALL = (
    "run.max_steps=24",
    "run.learners=1",
    "syncer.shards=1",
    "workload.options.layers=1",
    "workload.options.width=32",
    "workload.options.heads=2",
    "workload.options.corpus_bytes_max=200000",
    "run.evaluate_interval_seconds=",
    "run.evaluator=false",
    "faults=",
)
"""The quickstart in seconds: one learner, few steps, a smaller model, no faults."""

SCRIPT = """\
import torch
import decoupled_diloco as dd

learner = dd.Learner(torch.nn.Linear(2, 2), syncer="http://syncer:7070", auth_token=None)
reveal_type(learner.global_step)
learner.step(tokens="many")
"""

IMPORT_ALL = """\
import importlib, pkgutil, sys
import decoupled_diloco

for each in pkgutil.walk_packages(decoupled_diloco.__path__, "decoupled_diloco."):
    if not each.name.endswith("__main__"):
        importlib.import_module(each.name)
print(*(name for name in sys.modules if name.startswith("decoupled_diloco_")))
"""

COMPLETE_IN_BASH = """\
eval "$(ddiloco --show-completion)"
complete -p ddiloco
COMP_WORDS=({words}) COMP_CWORD={last}
_ddiloco_completion ddiloco
echo "${{COMPREPLY[@]}}"
"""


class Environment:
    """A new environment with these wheels, and without these modules of other distributions."""

    def __init__(self, path: Path, *wheels: Path, lacking: Collection[str] = ()) -> None:
        self.path = path
        self.python = path / "bin" / "python"
        venv.create(path, with_pip=False, symlinks=True)
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet"]
        subprocess.run([*pip, "--no-deps", "--no-index", *wheels], check=True)
        own = Path(sysconfig.get_path("purelib", vars={"base": str(path)}))
        for each in Path(sysconfig.get_path("purelib")).iterdir():
            if "decoupled_diloco" not in each.name and each.name not in lacking:
                (own / each.name).symlink_to(each)

    def run(self, *command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Return the output of a command whose program is searched for here first."""
        return subprocess.run(
            ["/usr/bin/env", *command],
            cwd=cwd,
            env={"PATH": f"{self.path}/bin:/usr/bin:/bin", "HOME": str(cwd), **variables},
            capture_output=True,
            text=True,
        )


def build(project: Path, folder: Path) -> Path:
    """Return a folder with the sdist of a project, and the wheel that was built from it."""
    command = [sys.executable, "-m", "build", "--no-isolation"]
    done = subprocess.run([*command, "--outdir", folder, project], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist and the wheel of the core."""
    return build(ROOT, tmp_path_factory.mktemp("dist"))


FURTHER = ("engines", "lab", "plan")
"""The distributions other than the core, by their folders in `packages`."""


@pytest.fixture(scope="module")
def further(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each further distribution."""
    found = {}
    for name in FURTHER:
        dist = build(ROOT / "packages" / name, tmp_path_factory.mktemp(f"dist-{name}"))
        (found[name],) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel, installed."""
    return Environment(tmp_path_factory.mktemp("environment") / "venv", wheel)


@pytest.fixture(scope="module")
def all_installed(
    wheel: Path, further: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    """All wheels, installed."""
    return Environment(tmp_path_factory.mktemp("all") / "venv", wheel, *further.values())


@pytest.mark.smoke
def test_the_wheel_alone_trains_a_shipped_recipe(installed: Environment, tmp_path: Path) -> None:
    which = "import decoupled_diloco; print(decoupled_diloco.__file__)"
    assert str(installed.path) in installed.run("python", "-c", which, cwd=tmp_path).stdout
    sets = [word for setting in SMALL for word in ("--set", setting)]
    done = installed.run("ddiloco", "train", "quickstart", *sets, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "quickstart"
    assert load_weights(folder / "weights.safetensors")
    for name in ("run.toml", "report.html"):
        assert (folder / name).stat().st_size > 0, name
    tape = folder / "tape" / "shard-0.jsonl"
    assert any(True for _ in lines_of(tape, [])), "the tape, in segments or not"


@pytest.mark.smoke
def test_the_wheel_without_its_extra_explains_how_to_get_the_command(
    wheel: Path, tmp_path: Path
) -> None:
    base = Environment(tmp_path / "venv", wheel, lacking=NEEDED)
    done = base.run("ddiloco", "train", "quickstart", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: ddiloco needs {', '.join(NEEDED)}: run pip install")
    learner = "import decoupled_diloco as dd; print(dd.Learner.__name__)"
    assert base.run("python", "-c", learner, cwd=tmp_path).stdout == "Learner\n"


@pytest.mark.parametrize("what", ["rules", "dashboard"])
def test_the_wheel_alone_can_watch_a_run(installed: Environment, tmp_path: Path, what: str) -> None:
    done = installed.run("ddiloco", "metrics", what, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ddiloco_shard_learners" in done.stdout


PLAN = ("plan", "--params", "1e9", "--step-seconds", "1s", "--sites", "2", "--link", "1Gbit")
GOODPUT = ("goodput", "--chips", "10k", "--days", "0.1", "--seeds", "1", "--system", "elastic")


@pytest.mark.parametrize(
    ("command", "extra"),
    [(PLAN, "plan"), (GOODPUT, "plan"), (("simulate", "mixed-speeds"), "lab"), (("chaos",), "lab")],
    ids=["plan", "goodput", "simulate", "chaos"],
)
def test_the_wheel_alone_explains_how_to_install_a_command(
    installed: Environment, tmp_path: Path, command: tuple[str, ...], extra: str
) -> None:
    done = installed.run("ddiloco", *command, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    how = f"is not installed: run pip install -e packages/{extra} in the clone"
    assert done.stderr.startswith(f"error: ddiloco {command[0]} {how}")
    told = installed.run("ddiloco", "--help", cwd=tmp_path, COLUMNS="120").stdout
    assert f"Not installed: run ddiloco {command[0]} to see how to install it." in told


def test_the_wheel_imports_no_further_distribution(installed: Environment, tmp_path: Path) -> None:
    done = installed.run("python", "-c", IMPORT_ALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.strip()


def on_slurm(folder: Path) -> tuple[str, ...]:
    """Return a command that prints what would be submitted to Slurm."""
    (folder / "big.toml").write_text(
        '[run]\nlearners = 2\nmax_steps = 10\n[launch]\nbackend = "slurm"\n'
    )
    return ("ddiloco", "launch", "big.toml", "--dry-run")


def test_the_wheel_alone_explains_how_to_install_engines(
    installed: Environment, tmp_path: Path
) -> None:
    done = installed.run(*on_slurm(tmp_path), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    why = (
        "error: backend='slurm' in [launch] is not installed: "
        "run pip install -e packages/engines in the clone"
    )
    assert done.stderr.startswith(why)


@pytest.mark.smoke
def test_the_wheels_together_place_a_run(all_installed: Environment, tmp_path: Path) -> None:
    done = all_installed.run(*on_slurm(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH" in done.stdout


@pytest.mark.smoke
def test_the_wheels_together_plan(all_installed: Environment, tmp_path: Path) -> None:
    plan = all_installed.run("ddiloco", *PLAN, cwd=tmp_path)
    assert plan.returncode == 0, plan.stderr
    assert plan.stdout.startswith("1B parameters, 24 layers, a step of 1 s; 2 learners at 2 sites")
    goodput = all_installed.run("ddiloco", *GOODPUT, cwd=tmp_path)
    assert goodput.returncode == 0, goodput.stderr
    assert goodput.stdout.splitlines()[1].startswith("elastic")


@pytest.mark.parametrize("name", FURTHER)
def test_a_further_wheel_contains_only_its_package(further: dict[str, Path], name: str) -> None:
    with zipfile.ZipFile(further[name]) as archive:
        names = set(archive.namelist())
    tops = {each.split("/")[0] for each in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {f"decoupled_diloco_{name}"}
    assert f"decoupled_diloco_{name}/py.typed" in names


@pytest.mark.parametrize("command", [["ddiloco"], ["python", "-m", "decoupled_diloco"]])
@pytest.mark.parametrize("kind", ["recipes", "scenarios"])
def test_shipped_recipes_are_listed_and_printed(
    all_installed: Environment, tmp_path: Path, command: list[str], kind: str
) -> None:
    folder = ROOT / kind if kind == "recipes" else Path(decoupled_diloco_lab.__file__).parent / kind
    files = {path.stem: path for path in folder.glob("*.toml")}
    listed = all_installed.run(*command, kind, cwd=tmp_path).stdout.splitlines()
    assert [line.partition("\t")[0] for line in listed] == sorted(files)
    name = sorted(files)[0]
    printed = all_installed.run(*command, kind, name, cwd=tmp_path).stdout
    assert printed == files[name].read_text()


def test_a_shipped_scenario_finds_its_recipe(all_installed: Environment, tmp_path: Path) -> None:
    short = ["--protocol-only", "--set", "run.max_steps=24"]
    done = all_installed.run("ddiloco", "simulate", "mixed-speeds", *short, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of virtual time in" in done.stdout


def test_a_file_takes_precedence_over_a_shipped_recipe(
    installed: Environment, tmp_path: Path
) -> None:
    (tmp_path / "homelab").write_text("[run]\n")
    own = installed.run("ddiloco", "train", "homelab", cwd=tmp_path)
    assert (own.returncode, own.stdout) == (2, "")
    assert own.stderr.startswith("error: [run] has no budget, so the run would never end")
    unknown = installed.run("ddiloco", "train", "homelap", cwd=tmp_path)
    assert unknown.returncode == 2
    assert "is neither a file nor a shipped recipe: did you mean 'homelab'?" in unknown.stderr


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("ddiloco trai", "train"),
        ("ddiloco train quick", "quickstart"),
        ("ddiloco train no-such", ""),
    ],
)
def test_bash_completes(installed: Environment, tmp_path: Path, words: str, completed: str) -> None:
    script = COMPLETE_IN_BASH.format(words=words, last=len(words.split()) - 1)
    told = installed.run("bash", "--norc", "-c", script, cwd=tmp_path)
    registered, _, reply = told.stdout.partition("\n")
    assert registered == "complete -o default -F _ddiloco_completion ddiloco", told.stderr
    assert reply.strip() == completed


def test_zsh_receives_names_with_titles(installed: Environment, tmp_path: Path) -> None:
    asked = {"_DDILOCO_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "ddiloco train quick"}
    told = installed.run("ddiloco", cwd=tmp_path, **asked).stdout
    assert told.startswith('_arguments \'*: :(("quickstart":"Four learners and two')
    assert len(told.splitlines()) == 1


def test_types_are_shipped(
    installed: Environment, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", installed.python]
    # The analysis of torch takes a minute; its cache outlives this test.
    mypy += ["--cache-dir", str(pytestconfig.cache.mkdir("mypy-of-the-wheel"))]
    done = subprocess.run([*mypy, "mine.py"], cwd=tmp_path, capture_output=True, text=True)
    assert 'mine.py:5: note: Revealed type is "int"' in done.stdout, done.stdout + done.stderr
    assert 'mine.py:6: error: Argument "tokens" to "step" of "Learner" has' in done.stdout
    assert "Found 1 error in 1 file" in done.stdout


@pytest.mark.smoke
def test_the_wheel_contains_only_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"decoupled_diloco"}
    assert "decoupled_diloco/py.typed" in names
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.smoke
def test_the_sdist_contains_everything_to_build_and_test(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt"}
    needed |= {"recipes/quickstart.toml", "examples/train.py", "docs/reference/glossary.md"}
    needed |= {"tests/process/test_packaging.py", "benchmarks/README.md"}
    needed |= {f"packages/{name}/pyproject.toml" for name in FURTHER}
    assert needed <= names
    private = ("runs/", "dist/", "site/", ".venv/", ".mypy_cache/", ".hypothesis/")
    assert not [name for name in names if name.startswith(private) or "__pycache__" in name]
