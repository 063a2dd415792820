"""Files of a data set, looked up in folders and in archives, compressed or not; what is wrong with one is said with its name."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

UNPACK: dict[str, Callable[[bytes], bytes]] = {
    ".xz": lzma.decompress,
    ".gz": gzip.decompress,
    ".bz2": bz2.decompress,
}
BROKEN = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,  # zipfile: encrypted, or a compression that it lacks (NotImplementedError)
    lzma.LZMAError,
    zlib.error,
    zipfile.BadZipFile,
    tarfile.TarError,
)
"""What the standard library raises for files that are damaged, cut off or of another kind."""


@dataclass(frozen=True)
class Source:
    """A file that was found."""

    file: Path
    """The file on disk; for a member of an archive, the archive."""
    where: str
    """How errors call it."""
    load: Callable[[], bytes]

    def read(self) -> bytes:
        """The bytes, decompressed."""
        try:
            return self.load()
        except BROKEN as error:
            raise ValueError(f"{self.where} cannot be read ({_reason(error)}): it is damaged or incomplete.") from error

    def text(self) -> str:
        """The bytes as UTF-8, without the byte order mark that some tools add."""
        try:
            return self.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.where} is not UTF-8 text ({error}).") from error


def look_up(root: Path | None, places: Iterable[str], names: Sequence[str]) -> list[Source] | None:
    """All of the named files, from the first folder or archive below ``root`` that has all of them; None where none has.

    In a folder, a name may also carry .xz, .gz or .bz2. In an archive, the folders above a name do not matter.
    """
    for place in [root / place for place in places] if root is not None else []:
        found = _in_folder(place, names) if place.is_dir() else _in_archive(place, names)
        if found is not None:
            return found
    return None


def missing(task: str, root: Path | None, looked_for: str) -> ValueError:
    """The error for files that are not there."""
    if root is None:
        return ValueError(
            f"{task} is read from a folder, and none was given: pass --data-dir (data_dir=), or set NMSPARSE_DATA. "
            f"Looked for there: {looked_for}."
        )
    if not root.is_dir():
        return ValueError(f"{task}: the data folder {root} does not exist. Looked for there: {looked_for}.")
    return ValueError(f"{task} was not found in {root}. Looked for: {looked_for}.")


def _in_folder(folder: Path, names: Sequence[str]) -> list[Source] | None:
    found = [source for name in names if (source := _plain_or_packed(folder / name))]
    return found if len(found) == len(names) else None


def _plain_or_packed(path: Path) -> Source | None:
    if path.is_file():
        return Source(path, str(path), path.read_bytes)
    for suffix, unpack in UNPACK.items():
        packed = path.with_name(path.name + suffix)
        if packed.is_file():
            return Source(packed, str(packed), partial(_unpacked, packed, unpack))
    return None


def _unpacked(path: Path, unpack: Callable[[bytes], bytes]) -> bytes:
    return unpack(path.read_bytes())


def _in_archive(archive: Path, names: Sequence[str]) -> list[Source] | None:
    if not (archive.is_file() and archive.name.endswith((".zip", ".tar.gz"))):
        return None
    try:
        return _in_zip(archive, names) if archive.suffix == ".zip" else _in_tar(archive, names)
    except BROKEN as error:
        raise ValueError(f"{archive} cannot be read ({_reason(error)}): it is damaged or incomplete.") from error


def _in_zip(archive: Path, names: Sequence[str]) -> list[Source] | None:
    def load(member: str) -> bytes:
        with zipfile.ZipFile(archive) as opened:
            return opened.read(member)

    with zipfile.ZipFile(archive) as opened:
        chosen = _members(opened.namelist(), names)
    return [Source(archive, f"{archive} ({member})", partial(load, member)) for member in chosen] or None


def _in_tar(archive: Path, names: Sequence[str]) -> list[Source] | None:
    """Read in one pass, because going back in a compressed tar means to decompress from its start."""
    contents: dict[str, bytes] = {}
    with tarfile.open(archive) as opened:
        for member in opened:
            if member.isfile() and any(_is_named(member.name, name) for name in names):
                stream = opened.extractfile(member)
                contents[member.name] = stream.read() if stream else b""
    chosen = _members(list(contents), names)
    return [Source(archive, f"{archive} ({member})", partial(contents.__getitem__, member)) for member in chosen] or None


def _members(members: list[str], names: Sequence[str]) -> list[str]:
    """For each name the member that lies least deep; an empty list where one has none."""
    chosen = [min((member for member in members if _is_named(member, name)), key=len, default="") for name in names]
    return chosen if all(chosen) else []


def _is_named(member: str, name: str) -> bool:
    return f"/{member}".endswith(f"/{name}")


def _reason(error: Exception) -> str:
    """The first line: tarfile writes one for each compression that it tried."""
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(":")
