"""Secrets: given in the settings, or in a file that only its owner can read, such as a mounted one."""

from __future__ import annotations

from pathlib import Path

BYTES_MAX = 4_096


def read(value: str, file: str) -> str:
    """The secret; "" where there is none. A file's white space at the end does not count. Raises OSError, and
    UnicodeDecodeError for what is no text."""
    if not file:
        return value
    with Path(file).expanduser().open("rb") as stream:
        return stream.read(BYTES_MAX + 1).decode().strip()


def problems(name: str, value: str, file: str, *, chars_min: int) -> list[str]:
    """What is wrong with the settings `name` and `name_file`; never with the secret in it."""
    if value and file:
        return [f"'{name}', '{name}_file': give one of them"]
    try:
        secret = read(value, file)
    except OSError as error:
        return [f"'{name}_file': {file}: {error.strerror or error}"]
    except UnicodeDecodeError:
        return [f"'{name}_file': {file}: is no text"]
    where = f"'{name}_file': {file}: holds" if file else f"'{name}': has"
    if not secret:
        return [f"{where} nothing"] if file else []
    if len(secret) < chars_min:
        return [f"{where} {len(secret)} characters; at least {chars_min} are needed"]
    if len(secret) > BYTES_MAX or not (secret.isascii() and secret.isprintable()) or " " in secret:
        return [f"{where} something else than up to {BYTES_MAX} printable ASCII characters without a space"]
    return []
