"""The package: its types are checked, and its examples do what they say."""

import doctest
import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest
import quinion

USER = """
import numpy, quinion
client: quinion.Client = quinion.connect("x")
with client.open("s3://b/k") as file:
    data: bytes = file.read(10)
    parts: list[bytes] = file.read_ranges([(0, 1)])
    pin: quinion.Pin = file.pin(0, 10)
    view: memoryview = memoryview(pin)
    file.prefetch(progress=True)
    hint: quinion.Residency = client.residency("s3://b/k")
    ranges: list[tuple[int, int]] = hint.ranges
    reveal_type(file.size)
with quinion.Cache(memory=1 << 24, disk=("/x", 1 << 30), stores={"s3://b": {"region": "x"}, "m://t": {"k": b"v"}}) as cache:
    numbers: dict[str, int] = cache.stats()
    quinion.top(cache, times=1)
async def use() -> tuple[bytes, list[bytes], quinion.Pin, int]:
    file = await cache.aopen("x")
    return (await file.aread_at(0, 1), await file.aread_ranges([(0, 1)]), await file.apin(0, 1),
            await file.areadinto_at(0, bytearray(5)))
"""


def mypy(cache, *arguments):
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(cache), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_package_is_typed(tmp_path):
    found = mypy(tmp_path, "-p", "quinion")
    assert found.returncode == 0, found.stdout
    (tmp_path / "user.py").write_text(USER)
    found = mypy(tmp_path, str(tmp_path / "user.py"))
    assert found.returncode == 0 and 'Revealed type is "int"' in found.stdout.replace("builtins.", ""), found.stdout
    (tmp_path / "wrong.py").write_text(USER + "client.open(5)\n")
    assert mypy(tmp_path, str(tmp_path / "wrong.py")).returncode != 0


def test_the_examples_are_true():
    done = doctest.testmod(quinion)
    assert done.failed == 0 and done.attempted >= 4


ENGINES = ["pandas", "pyarrow", "duckdb", "polars"]
GUIDE = pathlib.Path(__file__).parents[3] / "docs" / "python.md"


def run_examples(text):
    examples = doctest.DocTestParser().get_doctest(text, {}, GUIDE.name, str(GUIDE), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(examples)
    return runner.summarize()


def test_the_recipes_of_the_guide_are_true():
    recipes, _engines = GUIDE.read_text().split("\n## With fsspec, and engines\n")
    assert len(re.findall(r"^\d+\. ", recipes, re.MULTILINE)) == 10
    done = run_examples(recipes + "\n>>> server.stop()\n")
    assert done.failed == 0 and done.attempted >= 20


def test_the_whole_guide_is_true():
    for engine in ENGINES:
        if importlib.util.find_spec(engine) is None:
            pytest.skip(f"SKIPPED: {engine} is not installed here")
    done = run_examples(GUIDE.read_text())
    assert done.failed == 0 and done.attempted >= 40
