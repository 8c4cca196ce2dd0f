"""The package: its types are checked, and its examples do what they say."""

import doctest
import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

import fsspec
import pytest
import quinion
from conftest import DATA, engine
from fsspec.registry import _registry
from quinion import _quinion
from test_fsspec import StoreByOtherNames

USER = """
import numpy, quinion, quinion.safetensors
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
    quinion.top(cache, client, times=1)
    quinion.top(times=1)
numbers = client.stats()
default: quinion.Client = quinion.connect()
weights = quinion.safetensors.load("s3://b/k") | quinion.safetensors.load(client, "s3://b/k", freshness="immutable")
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
    for name in ENGINES:
        engine(name)
    done = run_examples(GUIDE.read_text())
    assert done.failed == 0 and done.attempted >= 40


README = GUIDE.parents[1] / "README.md"


def test_the_lines_of_the_readme_are_true(tmp_path, monkeypatch):
    text = README.read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    data = DATA[: 2 << 20]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # a server of its own under the README's name
    with quinion.serve("node", memory=64 << 20, stores={"s3://bucket": {"part-0.parquet": data}}) as server:
        found = {}
        exec(program, found)
        assert found["footer"] == data[-8:] and found["view"] == data[: 1 << 20] and found["view"].readonly
        assert server.stats()["pins"] == 1
        # And what the text below says.
        assert "fsspec" in text
        (url,) = re.findall(r"`(quinion::s3://[^`]*)`", text)
        stub = type("Stub", (StoreByOtherNames,), {"protocol": ("s3", "s3a")})
        monkeypatch.setitem(_registry, "s3", stub)
        with fsspec.open(url, quinion={"server": "node"}) as file:
            assert file.read() == data
        found.clear()
    (cache,) = re.findall(r"`(quinion\.Cache\([^`]*)`", text)
    with eval(cache, {"quinion": quinion}) as made:
        assert made.open(README).read() == text.encode() and made.stats()["memory_bytes"] == 8 << 30


# The oldest C library that a wheel of `cargo xtask test python` may ask for; docs/python.md says it.
GLIBC_MAX = (2, 34)


def test_the_wheel_needs_no_more_than_its_tag_says():
    about = importlib.metadata.distribution("quinion").read_text("WHEEL")
    (tag,) = re.findall(r"^Tag: (.*)$", about, re.MULTILINE)
    interpreter, abi, system = tag.split("-", 2)
    assert (interpreter, abi) == ("cp311", "abi3") and _quinion.__file__.endswith(".abi3.so")
    glibc = re.fullmatch(rf"manylinux_(\d+)_(\d+)_{platform.machine()}", system)
    assert glibc, f"{tag} is no wheel for other machines"
    said = tuple(map(int, glibc.groups()))
    # The versions of its symbols, as the linker wrote them.
    library = pathlib.Path(_quinion.__file__).read_bytes()
    needed = max(tuple(map(int, found)) for found in re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?=[.\0])", library))
    assert needed <= said <= GLIBC_MAX, f"build it where the C library is no newer than {GLIBC_MAX}"
    assert f"glibc {GLIBC_MAX[0]}.{GLIBC_MAX[1]}" in GUIDE.read_text()


def later_pythons():
    """Those of this machine that are no environment."""
    found = []
    for minor in range(sys.version_info.minor + 1, sys.version_info.minor + 9):
        program = shutil.which(f"python3.{minor}")
        if program and subprocess.run([program, "--version"], capture_output=True).returncode == 0:
            found.append(program)
    return found


def test_later_pythons_load_the_same_wheel():
    if not (programs := later_pythons()):
        pytest.skip("SKIPPED: there is no later Python here")
    program = """
import quinion
with quinion.Cache(memory=16 << 20, stores={"mem://t": {"a": b"hello"}}) as cache:
    print(bytes(cache.open("mem://t/a").pin(0, 5)).decode())
"""
    folder = pathlib.Path(quinion.__file__).parents[1]
    for later in programs:
        done = subprocess.run(
            [later, "-c", program], env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True
        )
        assert done.stdout == "hello\n", f"{later}: {done.stderr}"
