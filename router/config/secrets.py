"""Secrets: in the settings, or in a file that only its owner can read, such as a mounted secret."""

from __future__ import annotations

from router.config.file_contents import content

BYTES_MAX = 4_096


def read(value: str, file: str) -> str:
    """Return the secret; "" if there is none. White space at the end of a file is dropped. Raises OSError, and
    UnicodeDecodeError if the file is no text."""
    if not file:
        return value
    return content(file, BYTES_MAX).decode().strip()


def problems(name: str, value: str, file: str, *, chars_min: int) -> list[str]:
    """Return the problems of the settings `name` and `name_file`; no line has the secret."""
    if value and file:
        return [f"'{name}', '{name}_file': set only one of them"]
    try:
        secret = read(value, file)
    except OSError as error:
        return [f"'{name}_file': {file}: {error.strerror or error}"]
    except UnicodeDecodeError:
        return [f"'{name}_file': {file}: is not UTF-8 text"]
    where = f"'{name}_file': {file}: holds" if file else f"'{name}': has"
    if not secret:
        return [f"{where} nothing"] if file else []
    if len(secret) < chars_min:
        return [f"{where} {len(secret)} characters; at least {chars_min} are required"]
    if len(secret) > BYTES_MAX or not (secret.isascii() and secret.isprintable()) or " " in secret:
        return [f"{where} something else than up to {BYTES_MAX} printable ASCII characters without a space"]
    return []
