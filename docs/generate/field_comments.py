"""An extension of griffe, which reads the sources for the API reference: the fields of a dataclass, by their comments.

In lindt a field is explained by the comment behind it, or by the lines of comment above it. The reference shows the
fields of a dataclass as a table with these comments, so that they are written once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))

from comments import comment_on


class FieldComments(griffe.Extension):
    """Add a table of attributes to a dataclass's docstring, and leave the fields out of the page's members.

    Griffe's own extension `dataclasses` reads the fields for the signature when the package is loaded. mkdocs.yml names
    it before this one, so that the fields are there until then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._told: list[griffe.Attribute] = []

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        if "dataclass" not in cls.labels and not any("dataclass" in str(one.value) for one in cls.decorators):
            return
        fields = [one for one in cls.members.values() if _is_field(one)]
        if not fields or cls.docstring is None:
            return
        assert isinstance(cls.filepath, Path)
        said = [comment_on(cls.filepath, field.lineno or 0, field.endlineno or 0) for field in fields]
        lines = "\n".join(f"    {one.name} ({one.annotation}): {text}" for one, text in zip(fields, said, strict=True))
        head, example, tail = cls.docstring.value.partition("\nExamples:")
        cls.docstring.value = f"{head.rstrip()}\n\nAttributes:\n{lines}\n{example}{tail}"
        self._told += fields

    def on_package(self, **_: Any) -> None:
        for field in self._told:
            assert isinstance(field.parent, griffe.Class)
            for parameter in field.parent.parameters:
                if str(parameter.default).startswith(("(lambda", "_")):  # a factory
                    parameter.default = "..."
            del field.parent.members[field.name]
        self._told.clear()


def _is_field(member: Any) -> bool:
    own = member.is_attribute and "property" not in member.labels
    return own and member.annotation is not None and not member.name.startswith("_")
