"""The shape of the packages: imports go one way, the core is pure, and decides alone."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from types import ModuleType

import pytest

import decoupled_diloco
import decoupled_diloco_engines
import decoupled_diloco_lab
import decoupled_diloco_plan
from decoupled_diloco.__main__ import NEEDED

ROOT = Path(decoupled_diloco.__file__).parent
PACKAGE = "decoupled_diloco"

LAYERS = (
    ("_version", "errors", "units", "runtime"),
    ("protocol", "merge"),
    ("privacy",),
    ("transport",),
    ("config", "storage", "workloads"),
    ("tape",),
    ("run_model",),
    ("show",),
    ("monitor", "shell"),
    ("syncer",),
    ("learner",),
    ("ranks", "relay"),
    ("participants", "data"),
    ("device", "proximal"),
    ("export", "integrations", "launch"),
    ("cli", "__main__"),
)
"""Who may import whom: a package imports its own layer and those above this line's."""

RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

SHARED_WITH = {
    decoupled_diloco_plan: {
        *("errors", "units", "protocol", "merge", "config", "workloads"),
        *("tape", "run_model", "show", "cli"),
    },
    decoupled_diloco_lab: {
        *("errors", "units", "runtime", "protocol", "merge", "transport", "config", "storage"),
        *("workloads", "tape", "run_model", "show", "learner", "ranks", "participants", "syncer"),
        *("launch", "cli", "device"),
    },
    decoupled_diloco_engines: {
        *("errors", "units", "runtime", "transport", "config", "storage", "launch", "syncer"),
        *("tape", "run_model", "show", "learner"),
    },
}
"""What of the core each further distribution may use."""

PURE = ("protocol", "merge")
IMPURE_MODULES = {
    "aiohttp",
    "asyncio",
    "multiprocessing",
    "os",
    "pathlib",
    "random",
    "selectors",
    "shutil",
    "signal",
    "socket",
    "ssl",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "urllib",
}
TENSOR_MODULES = {"numpy", "safetensors", "torch"}

DECISIONS = {
    "advanced",
    "ask_if_qualified",
    "closes_at",
    "deliver_until",
    "kth_largest",
    "shift_after_leave",
    "window_decision",
}
"""Names of what decides quorum, grace, clock and versions."""


EDGES = {
    *("cli", "config", "export", "launch", "run_model", "show", "tape", "transport", "workloads")
}
"""Packages around the protocol and its shells."""


def all_modules() -> Iterator[tuple[str, str, ast.Module]]:
    """Those of the core and of the further distributions."""
    yield from modules()
    for further in SHARED_WITH:
        yield from modules(root=folder_of(further))


def folder_of(package: ModuleType) -> Path:
    assert package.__file__ is not None
    return Path(package.__file__).parent


def modules(*packages: str, root: Path = ROOT) -> Iterator[tuple[str, str, ast.Module]]:
    """Package, path and syntax tree of every module; of these packages, or of all."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        package = relative.parts[0].removesuffix(".py")
        if package == "__init__" or (packages and package not in packages):
            continue
        yield package, str(relative), tree_of(path)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(tree: ast.Module) -> Iterator[str]:
    """Every module that a module imports, those for type checkers included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            if node.module == PACKAGE:
                yield from (f"{PACKAGE}.{alias.name}" for alias in node.names)


def roots(tree: ast.Module) -> Iterator[str]:
    """The first names of what a module imports."""
    yield from (name.split(".")[0] for name in imports(tree))


def imported_at_once(tree: ast.Module) -> Iterator[str]:
    """What is imported with a module, packages included; nothing that is for type checkers."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            todo += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            todo += ast.iter_child_nodes(node)
        names = [alias.name for alias in getattr(node, "names", ()) if isinstance(alias, ast.alias)]
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" for name in names]
        for name in names:
            yield from accumulate(name.split("."), "{}.{}".format)


OF_AN_EXTRA = {
    *("show/console.py", "show/report.py", "show/terminal.py"),
    *("monitor/exposition.py", "monitor/learner_metrics.py", "monitor/shard_metrics.py"),
}
"""What cannot be imported without the extra of the command line, or that of metrics."""


def test_nothing_but_the_command_line_needs_its_extra() -> None:
    """All else can be imported without it: a learner, a syncer, the integrations."""
    imported = {path: set(imported_at_once(tree)) for _, path, tree in modules()}
    lacking, needing = set(NEEDED), set[str]()
    while more := {path for path, names in imported.items() if names & lacking} - needing:
        needing |= more
        names = (path.removesuffix(".py").removesuffix("/__init__") for path in more)
        lacking |= {f"{PACKAGE}.{name.replace('/', '.')}" for name in names}
    assert {path for path in needing if not path.startswith("cli/")} == OF_AN_EXTRA


def module_graph(files: Mapping[str, tuple[bool, str]]) -> dict[str, set[str]]:
    """The modules that each module imports: at once, in functions, and for type checkers.

    Args:
        files: By a module's full name: whether it is a package, and its text.
    """
    graph: dict[str, set[str]] = {}
    for name, (is_package, text) in files.items():
        found = graph[name] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parts = name.split(".")
                    home = parts[: len(parts) - node.level + is_package]
                    base = ".".join([*home, *([base] if base else [])])
                # ``from package import module`` imports the module; of any other name, the base.
                full = (f"{base}.{alias.name}" for alias in node.names)
                found |= {each if each in files else base for each in full}
        found &= files.keys() - {name}
    return graph


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module."""
    reached = {name: set(imported) for name, imported in graph.items()}
    for through in graph:
        for imported in reached.values():
            if through in imported:
                imported |= reached[through]
    groups = {
        tuple(sorted(other for other in graph if other in reached[name] and name in reached[other]))
        for name in graph
    }
    return sorted(list(group) for group in groups if group)


def sources() -> dict[str, tuple[bool, str]]:
    """Every module of every distribution in this repository, the package roots included."""
    found = {}
    for folder in (ROOT.parent, *sorted(ROOT.parents[1].glob("packages/*/src"))):
        for path in folder.rglob("*.py"):
            name = ".".join(path.relative_to(folder).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = (path.stem == "__init__", path.read_text())
    return found


def test_no_imports_form_a_cycle() -> None:
    files = sources()
    assert {PACKAGE, "decoupled_diloco_plan.commands"} <= files.keys()
    assert not cycles(module_graph(files))


@pytest.mark.parametrize(
    "back",
    [
        "from p import b",
        "import p.b",
        "from p.b import name",
        "from . import b",
        "from .b import name",
        "def function():\n    from p.b import name",
        "if TYPE_CHECKING:\n    from p.b import name",
        "from p import version",  # the root imports b
        "def function():\n    import p",
    ],
)
def test_a_cycle_is_found_however_it_is_imported(back: str) -> None:
    files = {
        "p": (True, "from p.b import name"),
        "p.a": (False, back),
        "p.b": (False, "import p.a"),
    }
    assert [set(group) & {"p.a", "p.b"} for group in cycles(module_graph(files))] == [
        {"p.a", "p.b"}
    ]
    del files["p.a"]
    assert not cycles(module_graph(files))


def test_every_package_has_its_layer() -> None:
    packages = {package for package, _, _ in modules()}
    assert packages <= RANK.keys(), "say in LAYERS where the new package belongs"


def test_imports_go_one_way() -> None:
    wrong = []
    for package, path, tree in modules():
        for name in imports(tree):
            root, _, rest = name.partition(".")
            imported = rest.split(".")[0]
            if root == PACKAGE and RANK.get(imported, 0) > RANK[package]:
                wrong.append(f"{path} imports {name}")
    assert not wrong


def test_the_core_imports_no_further_distribution() -> None:
    """It finds their commands and engines by entry points."""
    further = {path.name for path in ROOT.parents[1].glob("packages/*/src/*")}
    assert further == {module.__name__ for module in SHARED_WITH}
    assert not [path for _, path, tree in modules() if further & set(roots(tree))]


@pytest.mark.parametrize("further", SHARED_WITH, ids=lambda module: module.__name__)
def test_a_further_distribution_uses_what_the_core_shares_with_it(further: ModuleType) -> None:
    used = {
        rest.split(".")[0]
        for _, _, tree in modules(root=folder_of(further))
        for name in imports(tree)
        for root, _, rest in (name.partition("."),)
        if root == PACKAGE
    }
    assert used - {""} == SHARED_WITH[further]


def test_a_class_of_the_edges_has_a_name_that_no_other_class_has() -> None:
    places: defaultdict[str, set[str]] = defaultdict(set)
    for package, path, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].add(path if package in EDGES else "another package")
    assert not {name: found for name, found in places.items() if len(found) > 1}


@pytest.mark.parametrize("package", PURE)
def test_the_core_does_no_io_and_reads_no_clock(package: str) -> None:
    forbidden = IMPURE_MODULES | (TENSOR_MODULES if package == "protocol" else set())
    for _, path, tree in modules(package):
        used = set(roots(tree))
        assert not used & forbidden, path
        calls = {
            node.func.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not calls & {"open", "print", "input", "exec", "eval"}, path


def test_protocol_and_merge_do_not_know_each_other() -> None:
    for package, other in (("protocol", "merge"), ("merge", "protocol")):
        for _, path, tree in modules(package):
            assert not [n for n in imports(tree) if n.startswith(f"{PACKAGE}.{other}")], path


def test_quorum_grace_clock_and_versions_are_decided_in_the_protocol_alone() -> None:
    """There is no second implementation: all worlds drive the same machines."""
    wrong = []
    for package, path, tree in all_modules():
        if package == "protocol":
            continue
        for node in ast.walk(tree):
            name = getattr(node, "attr", None) or getattr(node, "id", None)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = node.name
            elif isinstance(node, ast.ImportFrom):
                name = next((a.name for a in node.names if a.name in DECISIONS), None)
            if name in DECISIONS:
                wrong.append(f"{path} uses {name}")
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Version":
                wrong.append(f"{path} makes a Version")
    assert not wrong


USE_THE_FEATURES = {"coordinator_machine.py", "coordinator_state.py", "learner_machine.py"}
"""The machines of the roles that have them; the rules of the method import no feature."""


def test_the_rules_of_the_method_import_no_feature() -> None:
    found = {
        path.removeprefix("protocol/")
        for _, path, tree in modules("protocol")
        if path.count("/") == 1
        and any(n.startswith(f"{PACKAGE}.protocol.features") for n in imports(tree))
    }
    assert found == USE_THE_FEATURES


OWN = ("protocol", "syncer", "learner")


def test_no_two_classes_have_one_name() -> None:
    """Those of the protocol and of its shells."""
    homes: dict[str, list[str]] = {}
    for _, path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(path)
    twice = [paths for paths in homes.values() if len(paths) > 1]
    assert not [paths for paths in twice if any(p.split("/")[0] in OWN for p in paths)]


def test_the_machines_are_told_by_their_shells_only() -> None:
    for _, path, tree in modules("learner", "syncer", "run_model"):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == f"{PACKAGE}.protocol":
                assert not {a.name for a in node.names} & {"rounds", "fill"}, path


SHELLS = ("learner", "syncer", "storage", "transport")
"""Real shells: they run on virtual machines, too, and so ask nobody but the runtime."""

OF_REAL_MACHINES = {
    "learner/launched.py": "a launcher's pipe, watched in a thread",
    "learner/stored_checkpoints.py": "an object store, through a temporary folder",
    "storage/mirror.py": "a separate process copies a run folder to an object store",
    "storage/object_store.py": "an object store of real machines",
    "storage/shared_folder.py": "shards on machines that share a file system",
    "learner/option_groups.py": "names a learner after its host and process",
    "learner/process.py": "signals, forks and the end of a user's program",
    "transport/fetch.py": "a command reads a running syncer's tapes",
    "transport/http_client.py": "real sockets",
    "transport/http_server.py": "real sockets",
    "transport/tls.py": "certificates of real sockets",
    "transport/reachability.py": "the doctor looks at real sockets",
    "transport/routing.py": "proxies of real sockets",
}
"""Files that no virtual machine runs, and what they are for."""

OF_THE_RUNTIME = {
    "multiprocessing",
    "secrets",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "uuid",
}
"""Modules that give the time, ids, threads or files."""

CALLS_OF_THE_RUNTIME = {
    "open",
    "os.link",
    "os.listdir",
    "os.open",
    "os.remove",
    "os.rename",
    "os.replace",
    "os.scandir",
    "os.stat",
    "os.walk",
    "os.urandom",
    "os.getpid",
    "random.Random",
    "random.choice",
    "random.random",
    "random.uniform",
    "ThreadPoolExecutor",
    "asyncio.run",
    "asyncio.new_event_loop",
}

FILE_METHODS = {
    "chmod",
    "exists",
    "glob",
    "hardlink_to",
    "is_dir",
    "is_file",
    "iterdir",
    "lstat",
    "mkdir",
    "read_bytes",
    "read_text",
    "rglob",
    "rmdir",
    "samefile",
    "stat",
    "symlink_to",
    "touch",
    "unlink",
    "walk",
    "write_bytes",
    "write_text",
}
"""Methods of a path that change or read a file, or ask whether it is there: each can fail."""

PATHS = ("file", "folder", "part", "path", "source", "target")
"""How paths are called where a method of a path has a name that other objects use, too."""


def dotted(node: ast.AST) -> str:
    """The name that a call calls, as far as it is one: ``os.open``."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else f".{node.attr}"
    return ""


def asks_past_the_runtime(tree: ast.Module) -> Iterator[str]:
    """What a module takes from the machine itself."""
    for name in imports(tree):
        if name.split(".")[0] in OF_THE_RUNTIME:
            yield f"imports {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            owner, _, method = name.rpartition(".")
            of_path = method in FILE_METHODS and name != method and not owner.endswith("disk")
            of_path |= method == "open" and owner.rpartition(".")[2].endswith(PATHS)
            if name in CALLS_OF_THE_RUNTIME or of_path:
                yield f"calls {name}"


def test_no_shell_asks_the_time_makes_an_id_starts_a_thread_or_opens_a_file_by_itself() -> None:
    found = {
        f"{path}: {what}"
        for _, path, tree in modules(*SHELLS)
        if path not in OF_REAL_MACHINES
        for what in asks_past_the_runtime(tree)
    }
    within_fill = {"chmod", "stat", "touch"}  # of `Disk.fill`
    allowed = {f"storage/weight_files.py: calls torn.{method}" for method in within_fill}
    assert found == allowed


def test_what_is_of_real_machines_is_there_and_needs_to_be() -> None:
    for path in OF_REAL_MACHINES:
        tree = ast.parse((ROOT / path).read_text())
        assert list(asks_past_the_runtime(tree)), f"{path} goes through the runtime now"


FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace"),
    *("logspace", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor"),
    *("tril_indices", "triu_indices", "zeros"),
}
"""Functions of torch whose result depends on the process's default device."""

WHOLE = {"randint", "randperm", "tril_indices", "triu_indices"}
"""Those that give whole numbers, whatever the default dtype is."""


def test_no_tensor_depends_on_the_default_device_or_dtype_of_its_process() -> None:
    """A learner is a guest in a program that may have set both; the model itself is PyTorch's.

    `torch.load` maps to the default device, too, and a generator belongs to a device.
    """
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        of_modules = {
            id(argument)
            for call in ast.walk(tree)
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "nn.Parameter"
            for argument in call.args
            if path.parent.name == "workloads"  # a module is built where its context says
        }
        for call in (each for each in ast.walk(tree) if isinstance(each, ast.Call)):
            name = ast.unparse(call.func).removeprefix("torch.")
            if ast.unparse(call.func) == name or id(call) in of_modules:
                continue
            given = {keyword.arg for keyword in call.keywords}
            wanted: set[str] = set()
            if name in FACTORIES:
                wanted = {"device"} if name in WHOLE else {"device", "dtype"}
            elif name == "load":
                wanted = {"map_location"}
            missing = wanted - given
            if missing or (name == "Generator" and not (call.args or given)):
                found.append(f"{path.relative_to(ROOT)}:{call.lineno}: {name} lacks {missing}")
    assert not found


def test_no_file_name_occurs_twice() -> None:
    """A name in a traceback or an editor's search leads to one file."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    project = ROOT.parents[1]
    found = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True)
    for path in found.stdout.splitlines():
        if (project / path).is_file():
            names[path.rpartition("/")[2]].append(path)
    for each in ("__init__.py", "__main__.py", "conftest.py"):  # Python and pytest give these names
        del names[each]
    assert len(names) > 700
    assert not [paths for paths in names.values() if len(paths) > 1]
