"""Three hospitals in three networks that reach only the syncer, by the commands of the page."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from docs.snippets import ROOT, SMALL, blocks_of
from network.network_spaces import WORKER, run_ip, spaces, unavailable
from process.process_runs import until

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "namespaces are available"),
]

PAGE = blocks_of(ROOT / "docs" / "how-to" / "federation.md")
HOSPITALS = ("hospital-a", "hospital-b", "hospital-c")
MACHINES = ("operator", *HOSPITALS)
OWN_STOP = (
    "ddiloco stop https://hub.example:7070 --ca-cert tls/authority.pem "
    "--cert tls/hospital-a.pem --key tls/hospital-a.key"
)


class Federation:
    """A folder for the operator and for each hospital, and links between their namespaces."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.started: list[subprocess.Popen[str]] = []
        shell = Path(sys.executable).parent
        self.path = f"{shell}{os.pathsep}{os.environ['PATH']}"
        for number, machine in enumerate(MACHINES):
            (root / machine).mkdir()
            hosts = ["127.0.0.1 localhost relay.example", "127.0.0.1 hub.example"]
            if machine != "operator":
                self._link(machine, number)
                hosts[1] = f"10.92.{number}.1 hub.example"
            names = Path("/etc/netns", self.space(machine), "hosts")
            names.parent.mkdir(parents=True, exist_ok=True)
            names.write_text("\n".join(hosts) + "\n")

    @staticmethod
    def space(machine: str) -> str:
        return f"ddfed{WORKER}-{machine[-9:]}"

    def _link(self, machine: str, number: int) -> None:
        ends = ((self.space("operator"), f"fd{number}", 1), (self.space(machine), "fd", 2))
        (one, first, _), (two, second, _) = ends
        run_ip("link", "add", first, "netns", one, "type", "veth", "peer", second, "netns", two)
        for space, device, own in ends:
            run_ip("-n", space, "addr", "add", f"10.92.{number}.{own}/24", "dev", device)
            run_ip("-n", space, "link", "set", device, "up")

    def run(self, machine: str, commands: str, *, wait: bool = True, code: int = 0) -> str:
        """Run commands of the page on a machine; return what they print."""
        options = (*SMALL, "run.max_steps=100000")  # until it is stopped
        small = " ".join(f"--set {option}" for option in options)
        commands = re.sub(r"(ddiloco (?:syncer|relay|learner) \S+)", rf"\1 {small}", commands)
        log = self.root / f"log-{len(self.started)}-{machine}"
        with log.open("w") as out:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.space(machine), "bash", "-ec", commands],
                cwd=self.root / machine,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "PATH": self.path, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self.started.append(process)
        if wait:
            assert process.wait(120) == code, log.read_text()
        return log.read_text()

    def copy(self, source: str, machine: str, *names: str) -> None:
        for name in names:
            target = self.root / machine / name
            target.parent.mkdir(exist_ok=True)
            shutil.copy(self.root / source / name, target)

    def logs(self) -> str:
        return "\n".join(f"{p.name}: {p.read_text()[-1500:]}" for p in self.root.glob("log-*"))

    def close(self) -> None:
        for process in self.started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    with spaces(*(Federation.space(machine) for machine in MACHINES)):
        made = Federation(tmp_path)
        try:
            yield made
        finally:
            print(made.logs())  # shown if the test fails
            made.close()


def of_hospital(text: str, number: int) -> str:
    """What a hospital writes instead of the words for the first one."""
    text = text.replace("hospital-a", HOSPITALS[number])
    return re.sub(r"(learner-|--index )([01])", lambda m: f"{m[1]}{2 * number + int(m[2])}", text)


def test_three_hospitals_train_one_model_by_the_commands_of_the_page(
    federation: Federation,
) -> None:
    made = federation
    key, gather, certificates, settings, syncer, join, status, stop, audit = PAGE
    for number, hospital in enumerate(HOSPITALS):
        made.run(hospital, of_hospital(key.text, number))
        made.copy(hospital, "operator", f"{hospital}.toml")
    assert "hospital-c  learner-4, learner-5: 0% to 100%" in made.run("operator", gather.text)
    made.run("operator", certificates.text)
    (made.root / "operator" / "federation.toml").write_text(settings.text)
    for number, hospital in enumerate(HOSPITALS):
        names = (hospital, f"learner-{2 * number}", f"learner-{2 * number + 1}")
        files = [f"tls/{name}.{suffix}" for name in names for suffix in ("pem", "key")]
        shared = ("tls/authority.pem", "federation.toml", "parties.toml")
        made.copy("operator", hospital, *shared, *files)
    made.run("operator", syncer.text, wait=False)
    run = made.root / "operator" / "runs" / "federation"
    until(lambda: (run / "addresses").exists(), "the syncer listens", 90.0)
    for number, hospital in enumerate(HOSPITALS):
        made.run(hospital, of_hospital(join.text, number) + "wait\n", wait=False)
    everyone = [f"learner-{number} joined" for number in range(6)]
    log = made.root / "log-5-operator"
    until(lambda: all(each in log.read_text() for each in everyone), "all learners", 90.0)
    shown = made.run("hospital-b", of_hospital(status.text, 1))
    assert {"learner-2", "learner-3"} <= set(re.findall(r"learner-\d", shown))
    assert not {f"learner-{n}" for n in (0, 1, 4, 5)} & set(re.findall(r"learner-\d", shown))
    shards = run / "audit" / "shard-0.jsonl"
    until(lambda: shards.read_text().count('"kind":"merge"') >= 30, "30 merges", 90.0)
    refused = made.run("hospital-b", of_hospital(OWN_STOP, 1), code=5)
    assert "party 'hospital-b' may not stop the run: only the operator" in refused
    made.run("operator", stop.text)
    until(lambda: (run / "weights.safetensors").exists(), "the model", 90.0)
    proved = made.run("operator", audit.text)
    assert "no record was removed, moved, altered or added" in proved
    assert "the contributions are masked" in proved
    for learner in range(6):
        assert f"learner-{learner}: " in proved
