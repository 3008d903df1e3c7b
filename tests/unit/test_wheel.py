"""The wheel holds one package, with real files where the tree has links, and the sdist gives the
same wheel. Where it is installed, with no checkout near, the command trains with all the processes
of a run, and lists and explains the commands.

Dependencies are those of the environment that runs the tests: the environment of the wheel finds
them behind its own packages, and nothing that is installed there as editable. That every import is
declared is a test of its own.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from rljax.experiments.cli import MENUS
from rljax.experiments.main import EXTRAS
from tests.import_rule import BARE, imports_of
from tests.unit.test_imports import sources

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = ("pyproject.toml", "README.md", "LICENSE")
COMMANDS = [f"{menu} {name}".removeprefix("rljax ") for menu, names in MENUS.items() for name in names]

OWN_CONFIG = """
from rljax.configs import quickstart

def get_config():
    config = quickstart.get_config()
    config.allocation_mode = "fake:d1+fake:d2"
    config.reward.name = "my_reward:length"
    config.reward.workers = 1
    config.rollout.workers = 1
    config.total_train_steps = 5
    config.warmup.steps = 0
    config.evaluator.freq_steps = None
    return config
"""
OWN_REWARD = """
def length(prompt, completion):
    return float(len(completion))
"""


def run(*command: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Without the import path of the tests."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | variables
    return subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def output(*command: str | Path, cwd: Path, **variables: str) -> str:
    done = run(*command, cwd=cwd, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(source: Path | str, out: Path) -> Path:
    """Without the network: setuptools is the test environment's."""
    flags = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out))
    output(sys.executable, "-m", "pip", "wheel", str(source), *flags, cwd=out.parent)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the tree, links kept as links."""
    copy = tmp_path_factory.mktemp("source")
    for name in FILES:
        shutil.copyfile(REPOSITORY / name, copy / name)
    for name in ("rljax", *BARE, "tests"):
        shutil.copytree(REPOSITORY / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The bin folder of an environment with the wheel. A .pth adds packages behind it, and theirs
    are not looked at: that is how editable installs work.
    """
    root = tmp_path_factory.mktemp("environment")
    venv.create(root, with_pip=False, symlinks=True)
    python = root / "bin" / "python"
    output(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=root)
    (packages,) = root.glob("lib/python*/site-packages")
    (packages / "behind.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    return root / "bin"


@pytest.mark.slow
def test_wheel_holds_only_rljax(wheel):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"rljax"}


@pytest.mark.slow
def test_wheel_holds_every_module_as_a_file(wheel):
    templates = REPOSITORY / "rljax" / "diagnosis" / "report" / "templates"
    expected = {"rljax/py.typed", *(str(file.relative_to(REPOSITORY)) for file in templates.iterdir())}
    for file in sources():
        inside = file.relative_to(REPOSITORY)
        expected.add(f"rljax/{inside}" if inside.parts[0] in BARE else str(inside))
    archive = zipfile.ZipFile(wheel)
    assert {name for name in archive.namelist() if ".dist-info/" not in name} == expected
    links = [info.filename for info in archive.infolist() if (info.external_attr >> 16) & 0o170000 == 0o120000]
    assert links == []


@pytest.mark.slow
def test_wheel_registers_the_engines_and_the_command(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    entry_points = archive.read(name).decode()
    assert "[rljax.engines]" in entry_points and "jax = rljax.engines.jax.plugin:PLUGIN" in entry_points
    assert "[console_scripts]\nrljax = rljax.experiments.cli:main" in entry_points


@pytest.mark.slow
def test_the_sdist_holds_no_link_and_gives_the_same_wheel(source, wheel, tmp_path):
    backend = "import setuptools.build_meta as backend, sys; backend.build_sdist(sys.argv[1])"
    output(sys.executable, "-c", backend, tmp_path, cwd=source)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        assert [member.name for member in archive if member.issym() or member.islnk()] == []
    again = zipfile.ZipFile(build_wheel(path, tmp_path / "again"))
    assert {info.filename: info.CRC for info in again.infolist() if not info.filename.endswith("/RECORD")} == {
        info.filename: info.CRC for info in zipfile.ZipFile(wheel).infolist() if not info.filename.endswith("/RECORD")
    }


@pytest.mark.slow
def test_the_installed_rljax_is_not_the_checkout(installed, tmp_path):
    for module in ("rljax", "rljax.engines.jax.plugin", "rljax.experiments.train", "rljax.configs.quickstart", "rljax.testing"):
        where = output(installed / "python", "-c", f"import {module} as module; print(module.__file__)", cwd=tmp_path)
        assert Path(where).is_relative_to(installed.parent) and not Path(where.strip()).is_symlink()


@pytest.mark.slow
def test_the_commands_are_listed_and_explained(installed, tmp_path):
    """By names that are there: no module of a checkout, no file of its configs."""
    listing = output(installed / "rljax", cwd=tmp_path)
    assert [line.split()[0] for line in listing.splitlines() if line.startswith("  ")] == list(MENUS["rljax"])
    for command in COMMANDS:
        explained = output(installed / "rljax", *command.split(), "--help", cwd=tmp_path)
        assert explained.startswith(f"usage: rljax {command} ")
        assert not re.search(r"python -m|(?<!rljax\.)experiments\.|configs/\w+\.py", explained), explained


@pytest.mark.slow
def test_the_quickstart_trains_by_name(installed, tmp_path):
    flags = [f"--config.{key}" for key in ("total_train_steps=5", "warmup.steps=0", "evaluator.freq_steps=None")]
    output(installed / "rljax", "train", "--config=quickstart", "--workdir=runs/quickstart", *flags, cwd=tmp_path)
    lines = (tmp_path / "runs" / "quickstart" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_run_of_ones_own_with_all_its_processes(installed, tmp_path):
    """A worker, a learner in two processes and a reward process, which find the reward in the
    directory that all start in.
    """
    (tmp_path / "my_config.py").write_text(OWN_CONFIG)
    (tmp_path / "my_reward.py").write_text(OWN_REWARD)
    output(installed / "rljax", "train", "--config=my_config.py", "--workdir=run", cwd=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert {line["rollout/workers"] for line in lines} == {1.0}
    assert (tmp_path / "run" / "ranks" / "rank1.log").is_file() and (tmp_path / "run" / "workers" / "0.log").is_file()


def test_what_is_imported_is_declared():
    """As a dependency, or as an extra's."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = [line for name, lines in project["optional-dependencies"].items() for line in lines]
    declared = {_normalized(re.split(r"[\[<>=!~ ]", line)[0]) for line in [*project["dependencies"], *extras]}
    distributions = importlib.metadata.packages_distributions()
    missing = {
        (head, str(file.relative_to(REPOSITORY)))
        for file in sources()
        for module, *_ in imports_of(file.read_text(), "")
        if (head := module.partition(".")[0]) not in sys.stdlib_module_names
        and head in distributions
        and head != "rljax"
        and not declared & {_normalized(name) for name in distributions[head]}
    }
    assert missing == set()


def _normalized(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_every_extra_that_an_error_names_is_there():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    named = {name for file in sources() for name in re.findall(r"rljax\[(\w+)\]", file.read_text())}
    assert named and named | set(EXTRAS.values()) <= project["optional-dependencies"].keys()
    distributions = importlib.metadata.packages_distributions()  # PIL is of pillow
    for package, extra in EXTRAS.items():
        names = {_normalized(name) for name in (package, *distributions.get(package, []))}
        assert any(line.startswith(tuple(names)) for line in project["optional-dependencies"][extra])


def test_optional_dependencies_have_a_lower_and_an_upper_bound():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lines = [line for lines in project["optional-dependencies"].values() for line in lines]
    assert [line for line in lines if "==" not in line and not (">=" in line and ",<" in line)] == []


@pytest.mark.parametrize("missing", ["pytest", "hypothesis"])
def test_the_suites_without_pytest_say_what_to_install(missing):
    source = f"import sys; sys.modules[{missing!r}] = None; import rljax.testing"
    done = run(sys.executable, "-c", source, cwd=REPOSITORY)
    assert done.stderr.splitlines()[-1].startswith(f"ModuleNotFoundError: rljax.testing: {missing} is not installed")
    assert "rljax[test]>=0.1" in done.stderr
