"""Finds the source that a definition of the user's depends on, across the user's own files.

    digest of my.module:reward
        reward   --uses-->  a helper of the same file
                 --imports--> my.parsing: f, and what f uses there
                 --imports--> numpy, json, rljax: the end; these have versions

Nothing is imported: a reward is imported in the reward processes alone. Each file is read once, and
of it only what is used, so that an edit of anything else is no change.
"""

from __future__ import annotations

import ast
import dis
import importlib.machinery
import importlib.util
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_Path = tuple[str, ...]  # names joined by dots: ("parsing", "last_number") of parsing.last_number
_INSTALLED = tuple(Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))


class Sources:
    """The statements that some definitions depend on, found by following names and imports."""

    def __init__(self) -> None:
        self._modules = dict[str, _Module | None]()
        self._wanted = list[tuple[_Module, _Path]]()
        self._seen = set[tuple[str, _Path]]()

    def add(self, module: str, names: Iterable[str], *, installed: bool = False) -> None:
        """Adds what a module defines under some names, and all that it depends on.

        Args:
          names: "f", or "Class.method"; those that the module does not have are left out. "" is all
            of the module.
          installed: whether to read a module that is installed, too. Its imports are followed
            where they lead to the user's own.
        """
        for name in names:
            self._want(module, tuple(name.split(".")) if name else (), installed=installed)
        while self._wanted:
            found, path = self._wanted.pop()
            self._trace(found, path)

    def add_imports(self, code: types.CodeType, package: str | None) -> None:
        """Adds what a function imports when it is called.

        Args:
          package: the package of the function's module, for its relative imports.
        """
        for node in _imports_of(code):
            for target, path in _targets(node, package or ""):
                self.add(target, [".".join(path)] if path else code.co_names)

    def add_modules(self, code: types.CodeType, modules: Mapping[str, object]) -> None:
        """Adds what code takes of modules by their attributes, as in "mylib.parsing.number(text)".

        Args:
          modules: the globals of the code; those that are no modules of the user's are left out.
        """
        for name, *attributes in _globals_of(code):
            module = modules.get(name)
            if isinstance(module, types.ModuleType) and is_users(module.__name__):
                self.add(module.__name__, [".".join(attributes)])

    def text(self) -> str:
        """Returns the syntax of all statements found; it is empty if there are none."""
        found = (module for _, module in sorted(self._modules.items()) if module is not None)
        return "\n".join(ast.dump(module.statements[i]) for module in found for i in sorted(module.used))

    def _want(self, module: str, path: _Path, *, installed: bool = False) -> None:
        """Notes names of a module as wanted; an empty path is all of it."""
        if (module, path) in self._seen:
            return
        self._seen.add((module, path))
        if (found := self._module(module, installed)) is not None:
            self._wanted.append((found, path))

    def _module(self, name: str, installed: bool) -> _Module | None:
        """Reads a module; None if it is not the user's own, or has no source."""
        if name not in self._modules:
            spec = _spec(name)
            self._modules[name] = _read(name, spec) if spec and (installed or is_users(name)) else None
        return self._modules[name]

    def _trace(self, module: _Module, path: _Path) -> None:
        if not path:
            for i in range(len(module.statements)):
                self._use(module, i)
            return
        head, rest = path[0], path[1:]
        holders = module.bound.get(head, ())
        for i in holders:
            self._use(module, i)
            for target, names in module.imports_as(i, head):
                if target == module.name and names:  # "from . import parsing" in the package itself
                    target, names = f"{target}.{names[0]}", names[1:]
                self._want(target, (*names, *rest))
        if not holders:
            for target in module.stars:
                self._want(target, path)
            self._want(f"{module.name}.{head}", rest)  # a submodule, if there is one
            if head != "__getattr__" and is_users(module.name):  # many packages answer old names by one
                self._want(module.name, ("__getattr__",))

    def _use(self, module: _Module, index: int) -> None:
        """Takes a statement, and wants what it refers to."""
        if index in module.used:
            return
        module.used.add(index)
        statement = module.statements[index]
        if isinstance(statement, ast.Import | ast.ImportFrom):  # of its names some may be wanted: `_trace` knows
            return
        local = [node for node in ast.walk(statement) if isinstance(node, ast.Import | ast.ImportFrom)]
        for path in set(_references(statement)):
            if path[0] in module.bound or module.stars:
                self._want(module.name, path)
            for target, names in _bindings(local, path[0], module.package):
                self._want(target, (*names, *path[1:]))


class _Module:
    """A file, parsed.

    Attributes:
      bound: the statements that bind a name, by their indices.
      stars: X of each statement "from X import *".
      used: indices of the statements that were found to be used.
    """

    def __init__(self, name: str, package: str, statements: list[ast.stmt]) -> None:
        self.name, self.package, self.statements = name, package, statements
        self.used = set[int]()
        self.bound = dict[str, list[int]]()
        self.stars = list[str]()
        for i, statement in enumerate(statements):
            for bound in _bound(statement):
                self.bound.setdefault(bound, []).append(i)
            if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                self.stars += [target for target, _ in _targets(statement, package)]

    def imports_as(self, index: int, name: str) -> Iterator[tuple[str, _Path]]:
        """Yields the module, and the path in it, that a statement imports under a name."""
        statement = self.statements[index]
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            nodes = [node for node in ast.walk(statement) if isinstance(node, ast.Import | ast.ImportFrom)]
            yield from _bindings(nodes, name, self.package)


def is_users(module: str) -> bool:
    """Returns whether a module is the user's own: not installed, Python's or rljax."""
    top = module.partition(".")[0]
    if top in ("__main__", "rljax", "builtins") or top in sys.stdlib_module_names:
        return top == "__main__"
    if file := getattr(sys.modules.get(module), "__file__", None):
        return not _is_installed(Path(file))
    if (spec := _spec(module)) is None:
        return False
    places = [spec.origin] if spec.has_location else spec.submodule_search_locations or ()
    return any(not _is_installed(Path(place)) for place in places if place)


def _is_installed(file: Path) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(file.parts) or any(map(file.is_relative_to, _INSTALLED))


def _spec(module: str) -> importlib.machinery.ModuleSpec | None:
    """Finds a module without importing its package, which `importlib.util.find_spec` does."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
        name = top
        for part in rest:
            name = f"{name}.{part}"
            spec = importlib.machinery.PathFinder.find_spec(name, spec.submodule_search_locations or []) if spec else None
    except (ImportError, AttributeError, ValueError):
        return None
    return spec


def _read(name: str, spec: importlib.machinery.ModuleSpec) -> _Module | None:
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    if spec.origin is None or not spec.has_location:  # a folder without __init__.py holds modules, and nothing else
        return _Module(name, package, [])
    try:
        return _Module(name, package, ast.parse(Path(spec.origin).read_bytes()).body)
    except (OSError, SyntaxError, ValueError):
        return None


def _bound(statement: ast.stmt) -> set[str]:
    """Returns the names that a statement of a module binds, those of its branches included."""
    names: set[str] = set()
    for node in ast.walk(statement) if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else ():
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
    return names or {getattr(statement, "name", "")}


def _references(node: ast.AST) -> Iterator[_Path]:
    """Yields the names that code refers to, with the attributes that it takes of them."""
    inner: ast.AST = node
    path: _Path = ()
    while isinstance(inner, ast.Attribute):
        path = (inner.attr, *path)
        inner = inner.value
    if isinstance(inner, ast.Name):
        yield (inner.id, *path)
        return
    for child in ast.iter_child_nodes(inner):
        yield from _references(child)


def _bindings(nodes: Iterable[ast.Import | ast.ImportFrom], name: str, package: str) -> Iterator[tuple[str, _Path]]:
    """Yields what import statements bind to a name: a module, and the path in it."""
    for node in nodes:
        for alias, (target, path) in zip(node.names, _targets(node, package), strict=False):
            if (alias.asname or alias.name.partition(".")[0]) == name:
                yield (target, path) if alias.asname or isinstance(node, ast.ImportFrom) else (name, ())


def _targets(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[tuple[str, _Path]]:
    """Yields the module of each name of an import statement, and the name's path in that module."""
    for alias in node.names:
        if isinstance(node, ast.Import):
            yield alias.name, ()
            continue
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        module = ".".join([*above, *([node.module] if node.module else [])])
        yield module, () if alias.name == "*" else (alias.name,)


def _imports_of(code: types.CodeType) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yields the import statements in a function's code, nested functions included."""
    constants = list[object]()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_CONST":
            constants.append(instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            level, names = constants[-2:]  # as the compiler leaves them on the stack
            if isinstance(names, tuple) and isinstance(level, int):
                yield ast.ImportFrom(instruction.argval or None, [ast.alias(str(name)) for name in names], level)
            else:
                yield ast.Import([ast.alias(instruction.argval)])
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _imports_of(constant)


def _globals_of(code: types.CodeType) -> Iterator[_Path]:
    """Yields the globals that code refers to, with the attributes that it takes of them."""
    path: _Path = ()
    for instruction in dis.get_instructions(code):
        if path and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path = (*path, instruction.argval)
            continue
        if path:
            yield path
        path = (instruction.argval,) if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") else ()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant)
