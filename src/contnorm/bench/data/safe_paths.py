"""Checks of paths that are read from files: they must stay inside a folder."""

from __future__ import annotations

from pathlib import Path

__all__ = ["is_plain_name", "path_inside"]


def path_inside(folder: Path, name: str) -> Path | None:
    """Join a folder and a relative path read from a list; None if the path could leave the folder.

    The check is lexical: absolute paths, drives and ``..`` are refused. Symbolic links in the folder are followed,
    because whoever owns the folder made them, not whoever wrote the list.

    Example:
        >>> path_inside(Path("images"), "sea/1.png").as_posix()
        'images/sea/1.png'
        >>> path_inside(Path("images"), "../1.png"), path_inside(Path("images"), "/1.png")
        (None, None)
    """
    path = Path(name)
    if not path.parts or path.anchor or ".." in path.parts or "\0" in name:
        return None
    return folder / path


def is_plain_name(name: object) -> bool:
    """Whether a value is the name of a file or folder, without any path and without control characters.

    Example:
        >>> is_plain_name("build-1"), is_plain_name("../build-1"), is_plain_name(None)
        (True, False, False)
    """
    if not isinstance(name, str) or not name.isprintable():
        return False
    return path_inside(Path(), name) is not None and Path(name).name == name
