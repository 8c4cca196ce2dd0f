"""The package: its types are checked, and its examples do what they say."""

import doctest
import pathlib
import subprocess
import sys

import quinion

USER = """
import numpy, quinion
client: quinion.Client = quinion.connect("x")
with client.open("s3://b/k") as file:
    data: bytes = file.read(10)
    parts: list[bytes] = file.read_ranges([(0, 1)])
    pin: quinion.Pin = file.pin(0, 10)
    view: memoryview = memoryview(pin)
    reveal_type(file.size)
"""


def mypy(*arguments):
    command = [sys.executable, "-m", "mypy", "--strict", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_package_is_typed(tmp_path):
    found = mypy("--no-incremental", "-p", "quinion")
    assert found.returncode == 0, found.stdout
    (tmp_path / "user.py").write_text(USER)
    found = mypy("--no-incremental", str(tmp_path / "user.py"))
    assert found.returncode == 0 and 'Revealed type is "int"' in found.stdout.replace("builtins.", ""), found.stdout
    (tmp_path / "wrong.py").write_text(USER + "client.open(5)\n")
    assert mypy("--no-incremental", str(tmp_path / "wrong.py")).returncode != 0


def test_the_examples_are_true():
    done = doctest.testmod(quinion)
    assert done.failed == 0 and done.attempted >= 4


def test_the_guide_is_true():
    guide = pathlib.Path(__file__).parents[3] / "docs" / "python.md"
    done = doctest.testfile(str(guide), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert done.failed == 0 and done.attempted >= 10
