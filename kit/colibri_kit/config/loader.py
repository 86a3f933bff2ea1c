"""YAML without its traps: text stays text, and every error names file, line and column.

PyYAML's own loaders keep the last of two equal keys, read ``no`` as false,
``0755`` as 493 and ``12:30:00`` as 45000. Here a file is composed to nodes,
scalars are kept as written, and the schema alone decides what is a number.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from colibri_kit.errors import ConfigError

MAX_FILE_BYTES = 256 * 1024
MAX_NODES = 5000  # counted after aliases are expanded: stops alias bombs
MAX_DEPTH = 16

M = TypeVar("M", bound=BaseModel)
Path_ = tuple[str | int, ...]


class Text(str):
    """A scalar as written; ``quoted`` tells ``"true"`` from ``true``."""

    quoted: bool = False


class _NodeLoader(yaml.SafeLoader):
    """Composes nodes only; every untagged scalar is a string."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own interface)


@dataclass
class Document:
    """A parsed file: plain dicts, lists and :class:`Text`, and where each of them stands."""

    file: str
    data: Any
    value_mark: dict[Path_, tuple[int, int]] = field(default_factory=dict)
    key_mark: dict[Path_, tuple[int, int]] = field(default_factory=dict)

    def where(self, path: Path_, *, key: bool = False) -> str:
        """``file:line:col`` of the value (or key) at path, or of its nearest parent."""
        marks = self.key_mark if key else self.value_mark
        while path and path not in marks:
            path, marks = path[:-1], self.value_mark
        line, col = marks.get(path, (1, 1))
        return f"{self.file}:{line}:{col}"


def _fail(problems: Iterable[str], file: str) -> ConfigError:
    lines = list(problems)
    head = lines[0] if len(lines) == 1 else f"{len(lines)} errors in {file}\n" + "\n".join(lines)
    return ConfigError(
        head, hint="docs/boards.md lists every key of a board, docs/deploy.md of a recipe", code="CK-CONFIG"
    )


class _Builder:
    def __init__(self, file: str) -> None:
        self.doc = Document(file, None)
        self.problems: list[str] = []
        self._count = 0

    def at(self, mark: Any) -> str:
        return f"{self.doc.file}:{mark.line + 1}:{mark.column + 1}"

    def build(self, node: yaml.Node, path: Path_) -> Any:
        self._count += 1
        if self._count > MAX_NODES:
            raise _fail([f"{self.at(node.start_mark)}: more than {MAX_NODES} values"], self.doc.file)
        if len(path) > MAX_DEPTH:
            raise _fail([f"{self.at(node.start_mark)}: nested deeper than {MAX_DEPTH} levels"], self.doc.file)
        self.doc.value_mark[path] = (node.start_mark.line + 1, node.start_mark.column + 1)
        kind = {yaml.ScalarNode: "str", yaml.SequenceNode: "seq", yaml.MappingNode: "map"}[type(node)]
        if node.tag != f"tag:yaml.org,2002:{kind}":
            self.problems.append(f"{self.at(node.start_mark)}: tags are not allowed ({node.tag})")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, i)) for i, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        if node.value == "" and node.style is None:
            return None
        text = Text(node.value)
        text.quoted = node.style is not None
        return text

    def _mapping(self, node: yaml.MappingNode, path: Path_) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.problems.append(f"{self.at(key.start_mark)}: a key must be plain text")
                continue
            sub = (*path, str(key.value))
            if key.value in out:
                first = self.doc.key_mark[sub]
                self.problems.append(
                    f"{self.at(key.start_mark)}: duplicate key '{key.value}', "
                    f"first given at line {first[0]}, column {first[1]}"
                )
                continue
            self.doc.key_mark[sub] = (key.start_mark.line + 1, key.start_mark.column + 1)
            out[str(key.value)] = self.build(value, sub)
        return out


def parse(text: str, file: str) -> Document:
    """Parses one YAML document.

    Raises:
        ConfigError: not YAML, duplicate keys, tags, several documents, or too large.
    """
    builder = _Builder(file)
    if len(text) > MAX_FILE_BYTES:
        raise _fail([f"{file}:1:1: larger than {MAX_FILE_BYTES} bytes"], file)
    try:
        loader = _NodeLoader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as err:
        mark = err.problem_mark or err.context_mark
        where = builder.at(mark) if mark is not None else f"{file}:1:1"
        what = ", ".join(filter(None, (err.context, err.problem)))
        raise _fail([f"{where}: {what}"], file) from err
    except yaml.YAMLError as err:
        raise _fail([f"{file}:1:1: {err}"], file) from err
    except RecursionError as err:
        raise _fail([f"{file}:1:1: nested too deeply"], file) from err
    if not isinstance(node, yaml.MappingNode):
        raise _fail([f"{file}:1:1: expected 'key: value' lines"], file)
    builder.doc.data = builder.build(node, ())
    if builder.problems:
        raise _fail(builder.problems, file)
    return builder.doc


def read(path: Path) -> Document:
    """Reads and parses a file; see :func:`parse`."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
        return parse(raw.decode("utf-8"), str(path))
    except OSError as err:
        raise ConfigError(f"cannot read {path}: {err.strerror}") from err
    except UnicodeDecodeError as err:
        line = raw.count(b"\n", 0, err.start) + 1
        col = err.start - (raw.rfind(b"\n", 0, err.start) + 1) + 1
        raise ConfigError(f"{path}:{line}:{col}: not UTF-8") from err


def _known_keys(model: type[BaseModel], loc: Path_) -> list[str]:
    """Keys allowed at loc, following nested models."""
    current: type[BaseModel] | None = model
    for part in loc:
        if current is None or not isinstance(part, str) or part not in current.model_fields:
            return []
        note = current.model_fields[part].annotation
        options = [note, *getattr(note, "__args__", ())]
        current = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)
    return list(current.model_fields) if current else []


def validate(doc: Document, model: type[M]) -> M:
    """Checks a document against a schema and returns the model.

    Raises:
        ConfigError: names every error at once, each with file:line:col.
    """
    try:
        return model.model_validate(doc.data)
    except ValidationError as err:
        problems = []
        for item in err.errors():
            loc: Path_ = tuple(item["loc"])
            name = ".".join(str(p) for p in loc)
            if item["type"] == "extra_forbidden":
                close = difflib.get_close_matches(str(loc[-1]), _known_keys(model, loc[:-1]), 1, 0.5)
                more = f"; did you mean '{close[0]}'?" if close else ""
                problems.append(f"{doc.where(loc, key=True)}: unknown key '{name}'{more}")
            elif item["type"] == "missing":
                problems.append(f"{doc.where(loc[:-1])}: missing key '{name}'")
            else:
                message = re.sub(r"^Value error, ", "", item["msg"])
                problems.append(
                    f"{doc.where(loc)}: {name}: {message}" if name else f"{doc.where(loc)}: {message}"
                )
        raise _fail(problems, doc.file) from err
