"""Rules about the source that linters do not know."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.harness import run_ranks_fresh

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_lightning"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 450
READS_ENVIRONMENT = PACKAGE / "utils" / "env.py"

# Optional packages, and the files (or packages) that may import them.
OPTIONAL = {
    "transformer_engine": ("precision/te.py",),
    "transformers": ("bridge/", "data/tokenizer/"),
    "flash_attn": ("layers/attention.py",),
    "mamba_ssm": ("layers/mamba.py",),
    "causal_conv1d": ("layers/mamba.py",),
    "nltk": ("data/preprocessing/sentences.py",),
    "sentencepiece": ("data/tokenizer/sentence_piece.py",),
    "tiktoken": ("data/tokenizer/tiktoken_file.py",),
}
# Required, but slow to import and needed by few: never imported with the package.
LAZY = ("datasets", "matplotlib", "pandas")

# Put together here so that this file passes its own test.
FOREIGN = ("/" + "work/", "/." + "library", "/opt/" + "pypi", "/opt/" + "wheels")


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Modules named by import statements, and by `import_module` with a literal, at any depth."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module
            case ast.Call(func=ast.Attribute(attr=function) | ast.Name(id=function)):
                first = node.args[0] if node.args else None
                if function in ("import_module", "__import__") and isinstance(first, ast.Constant):
                    yield str(first.value)


def environment_reads(tree: ast.Module) -> Iterator[int]:
    """Lines that use `os.environ` or `os.getenv`, other than to set or delete a variable."""
    written = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "getenv" | "environb"):
                if node not in written:
                    yield node.lineno
            case ast.ImportFrom(module="os"):
                if {alias.name for alias in node.names} & {"environ", "getenv", "environb"}:
                    yield node.lineno


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(), str(path)) for path in SOURCES}


def test_the_project_speaks_of_itself_alone() -> None:
    found = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {word}" for word in FOREIGN if word in text]
    assert not found


def test_files_stay_readable() -> None:
    lengths = {relative(path): path.read_text().count("\n") for path in SOURCES}
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_LINES}


def test_every_directory_with_sources_is_a_package() -> None:
    assert not {relative(path) for path in SOURCES if not (path.parent / "__init__.py").is_file()}


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if path.name == "__init__.py"], ids=relative
)
def test_init_files_only_re_export(path: Path, trees: dict[Path, ast.Module]) -> None:
    if path.parent == PACKAGE:
        pytest.skip("re-exports lazily; see test_public_names")
    docstring, *body = trees[path].body
    assert isinstance(docstring, ast.Expr), "no docstring"
    assert isinstance(docstring.value, ast.Constant), "no docstring"
    exported: list[str] = []
    names: list[str] = []
    for node in body:
        if isinstance(node, ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
        else:
            assert isinstance(node, ast.Assign), f"line {node.lineno} is no re-export"
            assert ast.unparse(node.targets[0]) == "__all__", f"line {node.lineno} is no re-export"
            exported = ast.literal_eval(node.value)
    assert sorted(exported) == sorted(names)  # their order is checked by ruff


def test_environment_variables_are_read_in_one_file(trees: dict[Path, ast.Module]) -> None:
    found = [
        f"{relative(path)}:{line}"
        for path, tree in trees.items()
        if path != READS_ENVIRONMENT
        for line in environment_reads(tree)
    ]
    assert not found


def test_the_environment_check_finds_reads_and_allows_writes() -> None:
    source = "import os\nos.environ['A'] = '1'\ndel os.environ['A']\nos.environ.get('B')\n"
    source += "x = os.environ['C']\nos.getenv('D')\nfrom os import environ\n"
    assert sorted(environment_reads(ast.parse(source))) == [4, 5, 6, 7]


def test_optional_packages_are_imported_where_they_may_be(trees: dict[Path, ast.Module]) -> None:
    found = []
    for path, tree in trees.items():
        for name in {module.split(".")[0] for module in imported_names(tree)} & OPTIONAL.keys():
            if not relative(path).startswith(OPTIONAL[name]):
                found.append(f"{relative(path)}: {name}")
    assert not found


def test_public_names() -> None:
    import megatron_lightning

    for name in megatron_lightning.__all__:
        assert getattr(megatron_lightning, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = megatron_lightning.no_such_name


def import_top_level_alone(rank: int, world_size: int) -> list[str]:
    _forget("megatron_lightning", *LAZY, "torch.distributed.checkpoint")
    before = set(sys.modules)
    importlib.import_module("megatron_lightning")
    return sorted(set(sys.modules) - before)


def test_importing_the_package_imports_nothing_else() -> None:
    assert run_ranks_fresh(import_top_level_alone, 1) == [["megatron_lightning"]]


TRITON_MODULES = tuple(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "megatron_lightning").glob("*/kernels/*.py")
    if path.stem not in ("__init__", "available")
)
"""What nothing imports unless triton is there: kernels are defined with its decorator."""


class _Absent:
    """A finder that makes packages look as if they were not installed."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> None:
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _forget(*packages: str) -> None:
    for name in list(sys.modules):
        if any(name == package or name.startswith(package + ".") for package in packages):
            del sys.modules[name]


def _forget_operations() -> None:
    """What was defined by hand can't be defined again while it is there."""
    for name, module in list(sys.modules.items()):
        for value in list(vars(module).values()) if name.startswith("megatron_lightning") else ():
            if type(value).__name__ == "Library":
                value._destroy()


def import_all_without_optional(rank: int, world_size: int) -> tuple[int, list[str]]:
    _forget_operations()
    _forget("megatron_lightning", *OPTIONAL, *LAZY)
    sys.meta_path.insert(0, _Absent(set(OPTIONAL)))  # type: ignore[arg-type]
    package = importlib.import_module("megatron_lightning")
    found = [info.name for info in pkgutil.walk_packages(package.__path__, "megatron_lightning.")]
    for name in found:
        if not name.startswith(TRITON_MODULES):
            importlib.import_module(name)
    return len(found), [name for name in LAZY if name in sys.modules]


def test_every_module_imports_without_optional_packages_and_none_imports_slow_ones() -> None:
    [(count, slow)] = run_ranks_fresh(import_all_without_optional, 1)
    assert count >= len(SOURCES) - 1
    assert not slow
