"""--config names a file, or a config that comes with rljax."""

import shutil
from pathlib import Path

import pytest

from rljax.config import files
from rljax.config import io as config_io
from rljax.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[3]


def test_every_config_has_a_name_and_is_the_file_of_it():
    names = files.names()
    assert {"base", "quickstart", "algorithms/grpo", "bench/grpo_step"} <= set(names)
    for name in names:
        file = REPOSITORY / "configs" / f"{name}.py"
        assert files.find(name).samefile(file) and files.find(name.replace("/", ".")).samefile(file)
        assert files.find(str(file)) == file


def test_a_name_and_its_file_are_one_config():
    for name in ("quickstart", "algorithms.grpo"):
        file = REPOSITORY / "configs" / f"{name.replace('.', '/')}.py"
        assert config_io.load(name, [("seed", "7")]) == config_io.load(str(file), [("seed", "7")])


def test_a_file_of_ones_own_comes_before_a_config_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    assert files.find("quickstart").samefile(REPOSITORY / "configs" / "quickstart.py")
    shutil.copyfile(files.find("algorithms/grpo"), tmp_path / "mine")
    assert files.find("mine") == Path("mine")
    (tmp_path / "quickstart").rmdir()
    (tmp_path / "mine").rename("quickstart")
    assert files.find("quickstart") == Path("quickstart")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("quikstart", "did you mean quickstart?"),
        ("configs/quickstart.py", "did you mean quickstart?"),  # where there is no checkout
        ("dapo", "did you mean algorithms/dapo?"),
        ("algorithm.dapo", "did you mean algorithms/dapo?"),
        ("runs/of_ours.py", "a Python file with get_config, or one by name: base, "),
    ],
)
def test_a_wrong_name_is_one_line_with_the_nearest(name, remedy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        config_io.load(name)
    assert str(refused.value).startswith(f"--config: no such file: {name} ({remedy}") and "\n" not in str(refused.value)
