"""The set-up cannot drift: pins, environment.yml, pyproject.toml and imports agree."""

import ast
import importlib.metadata as metadata
import json
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml
from IPython.core.inputtransformer2 import TransformerManager
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PIN_FILES = sorted(p.name for p in ROOT.glob("requirements*.txt"))
FIRST_PARTY = {"lib", "bench", "tests"}
# Distributions that a CUDA build of torch asks for by exact version; see requirements.txt.
LEFT_TO_TORCH = re.compile(r"nvidia-|cuda-|triton$")

# Modules outside .venv or outside the base requirements, and the only files that may import them.
ENGINE_MODULES, ENGINE_FILES = {"vllm"}, re.compile(r"lib/(corpus|engine\w*)\.py")
TRAINER_MODULES, TRAINER_FILES = (
    {"speculators", "hs_connectors", "datasets"},
    re.compile(r"lib/(training|samples)\.py|notebooks/03_\w+\.ipynb"),
)
# Other trainers, there to be compared with: imported by tests alone.
ORACLE_MODULES = {"specforge", "nemo_automodel"}


@cache
def requirements(name: str) -> dict[str, Requirement]:
    """Requirements of one file by canonical name; comments dropped, options kept out by a test."""
    lines = (line.split(" #")[0].strip() for line in (ROOT / name).read_text().splitlines())
    parsed = [Requirement(line) for line in lines if line and line[0] not in "#-"]
    return {canonicalize_name(r.name): r for r in parsed}


def pinned(name: str) -> dict[str, str]:
    return {n: str(r.specifier).removeprefix("==") for n, r in requirements(name).items()}


# --- pins -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PIN_FILES)
def test_every_line_is_an_exact_pin(name: str) -> None:
    lines = [line.strip() for line in (ROOT / name).read_text().splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    loose = [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._]+", line)]
    assert lines, f"{name} pins nothing"
    assert not loose, f"{name}: not of the form name==version: {loose}"
    names = [canonicalize_name(line.split("==")[0]) for line in lines]
    assert len(names) == len(set(names)), f"{name} names a distribution twice"


@pytest.mark.parametrize("name", [*PIN_FILES, "requirements.in", "requirements-test.in"])
def test_no_index_or_host_is_named(name: str) -> None:
    found = re.findall(r"^-.*|\S*://\S*|\S+ @ \S+", (ROOT / name).read_text(), flags=re.M)
    assert not found, f"{name} names where to fetch from: {found}; leave that to pip's own settings"


@pytest.mark.parametrize(
    ("direct", "pin_files"),
    [
        ("requirements.in", ["requirements.txt"]),
        ("requirements-test.in", ["requirements.txt", "requirements-test.txt"]),
    ],
)
def test_direct_requirements_are_pinned(direct: str, pin_files: list[str]) -> None:
    pins = {n: v for name in pin_files for n, v in pinned(name).items()}
    missing = requirements(direct).keys() - pins.keys()
    assert not missing, f"{direct} asks for {sorted(missing)}, which {pin_files} do not pin"
    for name, wanted in requirements(direct).items():
        assert wanted.specifier.contains(pins[name]), f"{direct}: {wanted}, pinned {pins[name]}"


def test_test_pins_add_to_the_base_pins() -> None:
    twice = pinned("requirements.txt").keys() & pinned("requirements-test.txt").keys()
    assert not twice, f"pinned in requirements.txt and again in requirements-test.txt: {twice}"


def test_engine_reads_the_target_as_the_workbook_does() -> None:
    base, engine = pinned("requirements.txt"), pinned("requirements-engine.txt")
    for name in ("torch", "transformers", "tokenizers", "safetensors", "gguf"):
        assert base[name] == engine[name], f"{name}: {base[name]} here, {engine[name]} in the engine"


@pytest.mark.parametrize(
    ("direct", "pin_files"),
    [
        ("requirements.in", ["requirements.txt"]),
        ("requirements-test.in", ["requirements.txt", "requirements-test.txt"]),
    ],
)
def test_pins_are_transitive_and_installed(direct: str, pin_files: list[str]) -> None:
    """Walks the installed metadata, so it also fails where .venv is not what the pins say."""
    pins = {n: v for name in pin_files for n, v in pinned(name).items()}
    todo = [(n, extra) for n, r in requirements(direct).items() for extra in ("", *r.extras)]
    seen: set[tuple[str, str]] = set()
    while todo:
        name, extra = item = todo.pop()
        if item in seen or LEFT_TO_TORCH.match(name):
            continue
        seen.add(item)
        assert name in pins, f"{name} is needed but {pin_files} do not pin it"
        installed = SpecifierSet(f"=={pins[name]}")  # ==2.13.0 admits 2.13.0+cpu
        assert installed.contains(metadata.version(name), prereleases=True), (
            f"{name} {metadata.version(name)} is installed, {pins[name]} is pinned"
        )
        for line in metadata.requires(name) or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                todo += [(canonicalize_name(needed.name), e) for e in ("", *needed.extras)]


# --- environment.yml and pyproject.toml -----------------------------------------------------------


def test_environment_yml_only_refers_to_the_pins() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge"]
    conda = [d for d in environment["dependencies"] if isinstance(d, str)]
    pip = [d for d in environment["dependencies"] if not isinstance(d, str)]
    assert sorted(d.split("=")[0] for d in conda) == ["pip", "python"], (
        f"conda installs only Python and pip, found {conda}; packages go to requirements.in"
    )
    assert pip == [{"pip": ["-r requirements.txt"]}]


def test_python_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    allowed = SpecifierSet(project["project"]["requires-python"])
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (python,) = (d for d in dependencies if isinstance(d, str) and d.startswith("python="))
    version = python.removeprefix("python=")
    assert allowed.contains(f"{version}.0"), f"environment.yml: {python}, pyproject.toml: {allowed}"
    assert not allowed.contains("3.10.99"), "the Makefile refuses Python below 3.11"
    assert project["tool"]["ruff"]["target-version"] == "py311"


# --- imports --------------------------------------------------------------------------------------


def cell_sources(notebook: Path) -> str:
    """Code cells as plain Python; line magics and shell lines become calls that import nothing."""
    cells = json.loads(notebook.read_text())["cells"]
    sources = ("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    return "\n".join(TransformerManager().transform_cell(s) for s in sources)


def imported(source: str) -> dict[str, bool]:
    """Top-level module -> must it be there (True), or is it asked for in a function or may it lack?

    An import inside `try: ... except ImportError:` may lack: the file says what it does then.
    """
    found: dict[str, bool] = {}

    def visit(node: ast.AST, at_import: bool) -> None:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            at_import = False
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            at_import = False
        elif isinstance(node, ast.Try) and any(
            isinstance(h.type, ast.Name) and h.type.id == "ImportError" for h in node.handlers
        ):
            at_import = False
        for name in names:
            top = name.split(".")[0]
            found[top] = found.get(top, False) or at_import
        for child in ast.iter_child_nodes(node):
            visit(child, at_import)

    visit(ast.parse(source), True)
    return found


def unexplained_imports(path: str, source: str) -> list[str]:
    """Imports of one file that the set-up does not provide, each with what to do."""
    allowed = set(requirements("requirements.txt"))
    if path.startswith(("tests/", "bench/")):
        allowed |= set(requirements("requirements-test.txt"))
        allowed |= set(requirements("requirements-nodeps.txt"))
    distributions = metadata.packages_distributions()
    problems = []
    for module, at_import in sorted(imported(source).items()):
        if module in sys.stdlib_module_names or module in FIRST_PARTY:
            continue
        if module in ENGINE_MODULES and ENGINE_FILES.fullmatch(path):
            continue
        if module in ORACLE_MODULES and not path.startswith("tests/"):
            problems.append(f"{module}: only tests may import it")
            continue
        if module in TRAINER_MODULES and TRAINER_FILES.fullmatch(path):
            if at_import:
                problems.append(f"{module}: import it inside the function that trains")
            continue
        providers = {canonicalize_name(d) for d in distributions.get(module, [])}
        if not providers & allowed:
            problems.append(f"{module}: provided by {sorted(providers) or 'nothing installed'}")
    return problems


SOURCES = [
    p.relative_to(ROOT).as_posix()
    for pattern in ("lib/**/*.py", "bench/**/*.py", "tests/**/*.py", "notebooks/*.ipynb")
    for p in sorted(ROOT.glob(pattern))
]


@pytest.mark.parametrize("path", SOURCES)
def test_imports_come_from_the_requirements(path: str) -> None:
    file = ROOT / path
    source = cell_sources(file) if file.suffix == ".ipynb" else file.read_text()
    problems = unexplained_imports(path, source)
    assert not problems, f"{path} imports what requirements.txt does not bring: {problems}"


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("lib/a.py", "import torch, json\nfrom lib import taps\nfrom . import b", ""),
        ("lib/a.py", "import no_such_module", "no_such_module: provided by nothing installed"),
        ("lib/a.py", "import pytest", "pytest: provided by ['pytest']"),
        ("tests/a.py", "import pytest", ""),
        ("lib/a.py", "def f():\n    import vllm", "vllm: provided by"),
        ("lib/engine_server.py", "import vllm", ""),
        ("lib/a.py", "def f():\n    import speculators", "speculators: provided by"),
        ("lib/training.py", "def f():\n    import speculators", ""),
        ("lib/training.py", "import speculators", "speculators: import it inside the function"),
        ("tests/a.py", "import specforge.core, nemo_automodel", ""),
        ("bench/a.py", "def f():\n    import specforge", "specforge: only tests may import it"),
        (
            "lib/training.py",
            "def f():\n    import nemo_automodel",
            "nemo_automodel: only tests may import it",
        ),
        ("notebooks/03_a.ipynb", "try:\n    import speculators\nexcept ImportError:\n    pass", ""),
        ("notebooks/03_a.ipynb", "import speculators", "speculators: import it inside the function"),
        (
            "notebooks/01_a.ipynb",
            "try:\n    import datasets\nexcept ImportError:\n    pass",
            "datasets: provided by",
        ),
    ],
)
def test_the_import_check_itself(path: str, source: str, complaint: str) -> None:
    problems = unexplained_imports(path, source)
    assert [p[: len(complaint)] for p in problems] == ([complaint] if complaint else [])


def test_the_makefile_switches_the_network_off() -> None:
    makefile = (ROOT / "Makefile").read_text()
    quiet = ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK", "VLLM_NO_USAGE_STATS")
    for variable in quiet:
        assert re.search(rf"^export {variable} [:?]= 1$", makefile, flags=re.M), variable
    assert re.search(r"labextension disable .*apputils-extension:announcements", makefile)


# --- make variables and command lines -------------------------------------------------------------


def make_options(variable: str) -> set[str]:
    """Names in a list of the Makefile, as command-line options spell them."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (names,) = re.findall(rf"^{variable} := (.*)$", text, flags=re.M)
    return {name.lower() for name in names.split()}


def test_make_passes_every_option_of_report_and_diagnose() -> None:
    """A field that make forgets would be ignored in silence: `make report NEWFIELD=...` says nothing."""
    from dataclasses import fields

    from lib import diagnose
    from lib.request import Request

    assert make_options("REPORT_OPTIONS") == {f.name for f in fields(Request)} | {"scheduler"}
    assert make_options("DIAGNOSE_OPTIONS") == {*diagnose.OPTIONS, "out"}
