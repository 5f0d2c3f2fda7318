"""The files in `deploy/` that no engine writes: the image and the SkyPilot task."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import yaml

from decoupled_diloco.config import dump_config
from decoupled_diloco_engines.kubernetes_objects import USER
from engines.manifests import BIN, placed, tool
from free_ports import free_ports
from process.process_runs import command, health, stopped_at_exit, until

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
TASK = ROOT / "deploy" / "skypilot" / "learner.yaml"


def copied() -> list[tuple[list[str], str]]:
    """Return sources and target of each COPY from the repository."""
    lines = DOCKERFILE.read_text().splitlines()
    copies = [line.split()[1:] for line in lines if line.startswith("COPY ")]
    return [(words[:-1], words[-1]) for words in copies if not words[0].startswith("--")]


def test_the_package_builds_from_the_copied_files_and_has_the_command(tmp_path: Path) -> None:
    """Build the package from only the files that the image copies."""
    for sources, target in copied():
        for source in sources:
            place = tmp_path / (source if target == "./" else target)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place)
            else:
                shutil.copy(ROOT / source, place)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(tmp_path)]
    ended = subprocess.run(build, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entries,) = (name for name in names if name.endswith("entry_points.txt"))
        found = re.search(r'^ENTRYPOINT \["(\w+)"\]$', DOCKERFILE.read_text(), re.MULTILINE)
        assert found is not None
        assert f"{found[1]} = decoupled_diloco.__main__:main" in archive.read(entries).decode()
    assert "decoupled_diloco/recipes/quickstart.toml" in names


def test_the_image_pins_the_pytorch_of_the_tests() -> None:
    text = DOCKERFILE.read_text()
    assert "grep '^torch==' constraints.txt" in text
    assert re.search(r"^torch==\d", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_image_and_pods_have_the_same_user() -> None:
    assert f"USER {USER}:{USER}" in DOCKERFILE.read_text()


def test_a_linter_finds_nothing_in_the_dockerfile() -> None:
    ended = subprocess.run([tool("hadolint"), str(DOCKERFILE)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


def test_the_learner_of_the_skypilot_task_trains(tmp_path: Path) -> None:
    """Run its `run` section as written, with the package already installed."""
    task = yaml.safe_load(TASK.read_text())
    port, run = free_ports(1)[0], tmp_path / "run"
    config = placed(
        run={"learners": 1, "max_steps": 40, "evaluator": False, "folder": run},
        syncer={"shards": 1, "port": port, "token_file": tmp_path / "token"},
    )
    (tmp_path / "token").write_text("hush\n")
    (tmp_path / "run.toml").write_text(dump_config(config))
    venv = tmp_path / "venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "ddiloco").symlink_to(BIN / "ddiloco")
    shard = command("syncer", str(tmp_path / "run.toml"), "--shard", "0")
    address = f"http://127.0.0.1:{port}"
    with stopped_at_exit(shard):
        until(lambda: health(address), "the shard listens")
        environment = {
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "HOME": str(tmp_path),
            **task["envs"],
            "SYNCER": address,
            **dict.fromkeys(task["secrets"], "hush"),
            "PATH": "/bin:/usr/bin",
        }
        learner = subprocess.run(
            ["bash", "-c", task["run"]],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert learner.returncode == 0, learner.stdout + learner.stderr
        assert shard.wait(240) == 0
