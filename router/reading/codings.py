"""How a request's body is coded, by its headers: what is compressed cannot be read here."""

from __future__ import annotations

from router.http.request import Refusal, Request

# Codings of RFC 9110 section 8.4.1, of RFC 7932 and 8878, and those with dictionaries (RFC 9842). Other words, such as
# the name of a charset, change nothing of a body, and engines do not look at them.
_COMPRESSING = frozenset(
    (b"gzip", b"x-gzip", b"deflate", b"br", b"zstd", b"compress", b"x-compress", b"dcb", b"dcz", b"lz4", b"snappy")
)
SGLANGS = b"x-body-compressed"  # SGLang's own header, with SGLANG_ENABLE_REQUEST_DECOMPRESSION


def is_opaque(request: Request, *, must_read: bool) -> bool:
    """Whether only an engine can read the body. Raises Refusal for a body that is compressed, by this header unless it
    `must_read` it."""
    fields = request.fields
    if b"content-encoding" in fields:
        values = [value for low, _, value in request.lines if low == b"content-encoding"]
        if not _COMPRESSING.isdisjoint(word.strip().lower() for value in values for word in value.split(b",")):
            raise _compressed()
    if fields.get(SGLANGS, b"").strip().lower() in (b"", b"identity"):
        return False
    if must_read:
        raise _compressed()
    return True


def _compressed() -> Refusal:
    return Refusal(415, "unsupported_encoding", "Compressed request bodies are not accepted.")
